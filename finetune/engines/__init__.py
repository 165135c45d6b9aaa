"""How several processes train one model: replicated, sharded by FSDP2, or by DeepSpeed."""
