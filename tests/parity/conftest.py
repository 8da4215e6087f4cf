"""What needs the Gemma file (253 MB, its own licence) runs in `make parity` only, which sets HEADRACE_PARITY=1."""

import os

collect_ignore = [] if os.environ.get("HEADRACE_PARITY") == "1" else ["test_gemma3_goldens.py"]
