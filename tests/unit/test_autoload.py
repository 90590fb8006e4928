"""The hook that waits for `import deepspeed`: when it acts, when it does not, and what it leaves alone.

Most tests run in a Python of their own with a stand-in for deepspeed; `arm()` does there what the installed .pth file
does at the start of every Python.
"""

import base64
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

DEEPSPEED = '''
"""A stand-in that says how it was called."""
LOADED = True

def initialize(args=None, model=None, config=None, config_params=None):
    """The docstring of deepspeed.initialize."""
    return ("deepspeed", config, config_params)
'''
ACCELERATOR = """
import types

class Accelerator:
    def __init__(self, cpu=False, deepspeed_plugin=None, deepspeed_plugins=None):
        self.distributed_type = type("Kind", (str,), {"value": "MULTI_CPU" if cpu else "DEEPSPEED"})
        self.distributed_type = self.distributed_type(self.distributed_type.value)
"""
FILES = {
    "deepspeed/__init__.py": DEEPSPEED,
    "deepspeed/env_report.py": "def main(): pass\n",
    "accelerate/__init__.py": "from accelerate.accelerator import Accelerator\nimport accelerate.utils.deepspeed\n",
    "accelerate/accelerator.py": ACCELERATOR,
    "accelerate/utils/deepspeed.py": "class HfDeepSpeedConfig:\n def __init__(self, config):\n  self.config = config\n",
    "torch.py": "STAND_IN = True\n", "elsewhere/plain.json": "{}",
    "elsewhere/ds.json": '{"zero_optimization": {"stage": 2}, "cad": {"tolerance": 0.1}}',
}  # fmt: skip
"""Stand-ins, and files beside the code that runs."""
ENGINE = """
import sys
import types
engine = types.ModuleType("deepspeed_cad.integrations.deepspeed.initialize")
engine.initialize = lambda original, block, args, kwargs: ("cad", dict(block), args, sorted(kwargs))
sys.modules["deepspeed_cad.integrations.deepspeed.initialize"] = engine
"""
ARM = "import _deepspeed_cad_autoload as hook; hook.arm()\n"
FIND = "from _deepspeed_cad_waiter import AUTOLOAD, find_waiter\n"


@pytest.fixture
def python(tmp_path):
    """Runs code in a new Python that finds the stand-in and this checkout; gives what it printed."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def run(code: str, path: Path = tmp_path, **environment: str) -> str:
        env = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}", **environment}
        # -S: no .pth file of an installed package arms the hook before the test does
        command = [sys.executable, "-S", "-c", code]
        done = subprocess.run(command, env=env, cwd=tmp_path / "elsewhere", capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.strip()

    return run


def test_find_spec_neither_triggers_nor_disarms(python) -> None:
    code = f"import sys, os; before = set(sys.modules)\n{ARM}" + (
        "print(*sorted(set(sys.modules) - before))\n"
        "import importlib.util as u\n"
        "specs = [u.find_spec('deepspeed') for _ in range(3)]\n"
        "print('deepspeed' in sys.modules, 'deepspeed_cad' in sys.modules, specs[0].origin.endswith('.py'))\n"
        "print(u.find_spec('deepspeed_not_there'))\n"
        "import deepspeed; print(hasattr(deepspeed.initialize, '__wrapped__'))"
    )
    ours = "_deepspeed_cad_autoload _deepspeed_cad_waiter"
    assert python(code).split("\n") == [ours, "False False True", "None", "True"], "arming imports nothing else"


def test_disarms_and_leaves_the_module_as_it_was(python) -> None:
    code = f"{FIND}{ARM}" + (
        "import sys, pickle, inspect, deepspeed\n"
        "print(type(deepspeed.__loader__).__name__, deepspeed.__spec__.loader is deepspeed.__loader__)\n"
        "f = deepspeed.initialize; print(f.__wrapped__ is not f, f.__name__, f.__doc__)\n"
        "print(inspect.getsource(deepspeed).count('LOADED'), pickle.loads(pickle.dumps(f)) is f)\n"
        "print(sorted(find_waiter(AUTOLOAD).waiting))\n"
        "import deepspeed.env_report, accelerate; print(find_waiter(AUTOLOAD))"
    )
    wrapped = "True initialize The docstring of deepspeed.initialize."
    waiting = "['accelerate.accelerator', 'accelerate.utils.deepspeed', 'deepspeed.env_report']"
    assert python(code).split("\n") == ["SourceFileLoader True", wrapped, "1 True", waiting, "None"]


def test_a_failing_import_is_reported_and_the_next_one_is_hooked(python, tmp_path) -> None:
    (tmp_path / "deepspeed" / "__init__.py").write_text(
        "import os\nif os.environ.pop('BROKEN', ''): raise OSError(1)\n" + DEEPSPEED
    )
    code = ARM + (
        "try:\n import deepspeed\nexcept OSError:\n print('failed')\n"
        "import deepspeed; print(hasattr(deepspeed.initialize, '__wrapped__'))"
    )
    assert python(code, BROKEN="1") == "failed\nTrue"


def test_a_broken_package_warns_and_deepspeed_still_imports(python) -> None:
    code = ARM + (
        "import sys, warnings; sys.modules['deepspeed_cad.launch.deepspeed_hook'] = None\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        " warnings.simplefilter('always'); import deepspeed\n"
        "print(deepspeed.LOADED, 'could not attach' in str(caught[0].message))"
    )
    assert python(code) == "True True"


UNREAD = {
    "no plugin": ("cpu=True", "", "fine"), "no block": ("cpu=True, deepspeed_plugin=plugin({})", "", "fine"),
    "block and DeepSpeed": ("deepspeed_plugin=plugin({'cad': {}})", "", "refused?\nfine"),
    "block on a CPU": ("cpu=True, deepspeed_plugin=plugin({'cad': {}})", "", "unread"),
    "block that is off": ("cpu=True, deepspeed_plugin=plugin({'cad': {'enabled': False}})", "", "fine"),
    "one of several": ("cpu=True, deepspeed_plugins={'a': plugin({}), 'b': plugin({'cad': {}})}", "", "unread"),
    "file of the launcher": ("cpu=True", "ds.json", "unread"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "file", "said"), UNREAD.values(), ids=UNREAD)
def test_a_block_that_accelerate_would_leave_unread(python, call: str, file: str, said: str) -> None:
    code = ARM + (
        "import sys, types, accelerate\nours = types.ModuleType('deepspeed_cad.integrations.prepared')\n"
        "ours.refuse_accelerator = lambda accelerator: print('refused?')\nsys.modules[ours.__name__] = ours\n"
        "plugin = lambda config: types.SimpleNamespace(deepspeed_config=config)\n"
        f"try:\n accelerate.Accelerator({call}); print('fine')\n"
        "except ValueError as error:\n assert 'it found MULTI_CPU, as on a CPU' in str(error); print('unread')"
    )
    launcher = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": file} if file else {}
    assert python(code, **launcher) == said


RECORD = """
import sys, types
asked = types.ModuleType("deepspeed_cad.launch.armed")
asked.after_import = lambda module: print(module.__name__, module.__spec__._initializing)
sys.modules["deepspeed_cad.launch.armed"] = asked
"""


@pytest.mark.parametrize("autoload", ["1", "0"])
def test_a_request_in_the_environment_is_told_of_what_trains(python, autoload: str) -> None:
    code = "import sys; before = len(sys.meta_path)\n" + ARM + RECORD
    code += "hook.arm(); import torch, accelerate, deepspeed, deepspeed.env_report; print(len(sys.meta_path) - before)"
    told = python(code, DEEPSPEED_CAD_CONFIG="{}", DEEPSPEED_CAD_AUTOLOAD=autoload).split("\n")
    assert told == ["torch True", "accelerate True", "deepspeed True", "0"]


def test_a_request_that_cannot_be_read_stops_the_import(python) -> None:
    code = f"import sys\nsys.stderr = sys.stdout\n{ARM}try:\n import torch\nexcept ValueError as error:\n print(error)"
    start, at_import = python(code, DEEPSPEED_CAD_CONFIG="{").splitlines()
    assert start.startswith("deepspeed_cad: DEEPSPEED_CAD_CONFIG cannot be used") and start.endswith(at_import)
    assert "in the environment is '{', which is not JSON" in at_import


CALLS = {
    "nothing": ("", "deepspeed"), "no block": ("config={'a': 1}", "deepspeed"),
    "disabled": ("config={'cad': {'enabled': False}}", "deepspeed"),
    "config": ("config={'cad': {'tolerance': 0.1}}", "cad"), "config_params": ("config_params={'cad': {}}", "cad"),
    "config before config_params": ("config={}, config_params={'cad': {}}", "deepspeed"),
    "args": ("types.SimpleNamespace(deepspeed_config='ds.json')", "cad"),
    "args without": ("types.SimpleNamespace(deepspeed_config=None), None, {}", "deepspeed"),
    "path": ("config='ds.json'", "cad"), "path object": ("config=pathlib.Path('ds.json')", "cad"),
    "path without": ("config='plain.json'", "deepspeed"), "positional": ("None, None, 'ds.json'", "cad"),
    "base64": ("config=" + repr(base64.urlsafe_b64encode(b'{"cad": {}}').decode()), "cad"),
    "unreadable": ("config='no such file'", "deepspeed"), "a list": ("config=[1]", "deepspeed"),
}  # fmt: skip


def test_where_the_config_comes_from(python) -> None:
    lines = [f"print(deepspeed.initialize({call})[0])" for call, _ in CALLS.values()]
    lines += ["print(deepspeed.initialize(1, model=2, config={'cad': {'granularity': 64}}))"]
    code = ARM + ENGINE + "import types, pathlib, deepspeed\n" + "\n".join(lines)
    *found, last = python(code).split("\n")
    assert dict(zip(CALLS, found)) == {name: expected for name, (_, expected) in CALLS.items()}
    assert last == "('cad', {'granularity': 64}, (1,), ['config', 'model'])", "the call as it was"


@pytest.mark.parametrize("order", ["import deepspeed; install()", "install(); install(); import deepspeed; install()"])
@pytest.mark.parametrize("autoload", ["1", "0"])
def test_install_is_idempotent_and_works_before_and_after(python, order: str, autoload: str) -> None:
    """Also where the environment turned the hook off."""
    code = ARM + (
        "from deepspeed_cad import install\n"
        f"was = find_waiter(AUTOLOAD) is not None; {order}; f = deepspeed.initialize\n"
        "print(was, hasattr(f, '__wrapped__'), hasattr(f.__wrapped__, '__wrapped__'))"
    )
    assert python(FIND + code, DEEPSPEED_CAD_AUTOLOAD=autoload) == f"{autoload == '1'} True False"
