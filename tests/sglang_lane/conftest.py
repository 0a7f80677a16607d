import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "programs"))
collect_ignore = [] if importlib.util.find_spec("sglang") else ["test_lane.py"]
