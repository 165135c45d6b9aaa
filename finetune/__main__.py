"""``python -m finetune`` is the command ``finetune``."""

from __future__ import annotations

import sys

from finetune.cli.main import main

sys.exit(main())
