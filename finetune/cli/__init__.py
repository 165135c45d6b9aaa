"""The command ``finetune``: one file per verb, each of which only parses, calls and prints."""
