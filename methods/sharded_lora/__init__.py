"""LoRA whose factors are gathered from pools that layers share."""
