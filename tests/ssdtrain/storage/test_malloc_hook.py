"""The malloc hook on stand-ins for CUDA and cuFile, under sanitizers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.storage import directory, malloc_hook
from ssdtrain.storage.clibrary import BuildError
from tests.compilers import needs_compiler
from tests.ranks import LONGEST_S

NATIVE = Path(__file__).parent / "native"
RECORDINGS = sorted((Path(__file__).parent / "data").glob("hook_calls_*.txt"))
WARNINGS = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-g"]
SANITIZERS = {
    "plain": [],
    "address+undefined": [
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        "-fno-omit-frame-pointer",
    ],
    "thread": ["-fsanitize=thread"],
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:verify_asan_link_order=0",
    "TSAN_OPTIONS": "die_after_fork=0:report_thread_leaks=0:exitcode=66",
}

pytestmark = needs_compiler


def compile_c(target: Path, *arguments: str | Path) -> None:
    command = ["cc", *WARNINGS, "-o", str(target), *map(str, arguments), "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Native:
    """The hook, the stand-ins and the driver, built with one sanitizer."""

    def __init__(self, directory: Path, flags: list[str]) -> None:
        self.directory = directory
        shared = [*flags, "-fPIC", "-shared"]
        link = [f"-L{directory}", f"-Wl,-rpath,{directory}"]
        compile_c(self.hook, *shared, "-fvisibility=hidden", malloc_hook.SOURCE, "-ldl")
        # cuFile calls the runtime and the runtime asks cuFile: no order links both.
        compile_c(
            directory / "libstubs.so",
            *shared,
            NATIVE / "stub_cuda.c",
            NATIVE / "stub_cufile.c",
        )
        driver = NATIVE / "driver.c"
        # Linked before the stand-ins, the hook is found first, as when preloaded.
        compile_c(directory / "hooked", *flags, driver, *link, "-l:hook.so", "-lstubs")
        compile_c(directory / "bare", *flags, driver, *link, "-lstubs")

    @property
    def hook(self) -> Path:
        return self.directory / "hook.so"

    def run(
        self, *arguments: str, program: str = "hooked", **environment: str
    ) -> dict[str, int]:
        given = {
            "SSDTRAIN_HOOK_CUFILE": str(self.directory / "libstubs.so"),
            **OPTIONS,
            **environment,
        }
        command = [str(self.directory / program), *arguments]
        # Old sanitizer runtimes cannot map their shadow where a new kernel's random
        # layout puts other things.
        done = subprocess.run(
            ["setarch", "-R", *command] if shutil.which("setarch") else command,
            env={**os.environ, **given},
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        pairs = (line.split() for line in done.stdout.splitlines())
        return {name: int(value) for name, value in pairs}


@pytest.fixture(scope="module", params=SANITIZERS)
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp(f"native-{request.param}")
    return Native(directory, SANITIZERS[request.param])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Native:
    return Native(tmp_path_factory.mktemp("native"), [])


def test_basic(native: Native) -> None:
    counters = native.run("basic")
    # 4 own calls that succeed or fail, and one of cuFile's for each registration.
    assert counters["malloc_calls"] == 4 + 2
    assert counters["malloc_async_calls"] == counters["free_async_calls"] == 1
    assert counters["reentrant"] == 2 * 2
    assert counters["failed_calls"] == 1
    assert counters["below_threshold"] == 1
    assert counters["registered"] == 1
    assert counters["refused"] == 1
    assert counters["last_cufile_error"] == 5023
    assert counters["deregistered"] == 0
    assert counters["live"] == counters["live_registered"] == 1
    assert counters["cufile_registered"] == 1
    assert counters["live_bytes"] == 4 * 1024 * 1024
    assert counters["unregistered_async"] == 1


def test_threads(native: Native) -> None:
    counters = native.run("threads", SSDTRAIN_HOOK_MIN_BYTES="2048")
    assert counters["unregistered_async"] > 100
    assert counters["live"] == counters["live_bytes"] == 0
    assert counters["cufile_registered"] == 0
    assert counters["registered"] == counters["deregistered"] > 500
    assert counters["below_threshold"] > 100


def test_fork(native: Native) -> None:
    counters = native.run("fork", SSDTRAIN_HOOK_MIN_BYTES="1024")
    assert counters["registered"] == counters["deregistered"] > 0
    assert counters["live"] == counters["cufile_registered"] == 0


def test_many_allocations_stay_known(plain: Native, tmp_path: Path) -> None:
    """The table grows, and addresses that come and go leave no trace in it."""
    base, lines = 0x7F0000000000, []
    for turn in range(3):
        rows = [(base + (i << 21), (i + turn) % 5 + 1) for i in range(2000)]
        lines += [f"cudaMalloc {a:#x} {s << 21} 0 0" for a, s in rows]
        lines += [f"cudaFree {a:#x} {s << 21} 0 0" for a, s in rows[turn:]]
        base += 2000 << 21
    (tmp_path / "calls").write_text("\n".join(lines) + "\n")
    counters = plain.run("replay", str(tmp_path / "calls"))
    assert counters["live"] == counters["live_registered"] == 0 + 1 + 2
    assert counters["registered"] == 6000


def test_switched_off(plain: Native) -> None:
    assert set(plain.run("basic", SSDTRAIN_HOOK="0").values()) == {0}


@pytest.mark.parametrize(
    "environment",
    [{"SSDTRAIN_HOOK_CUFILE": "/nowhere/libcufile.so"}, {"STUB_CUFILE_NO_DRIVER": "1"}],
    ids=["missing", "no driver"],
)
def test_without_cufile_allocations_are_counted(
    plain: Native, environment: dict[str, str]
) -> None:
    counters = plain.run("basic", **environment)
    assert counters["without_cufile"] == 2
    assert counters["unregistered_async"] == 1
    assert counters["registered"] == counters["refused"] == 0
    assert counters["live"] == 1
    assert counters["reentrant"] == 0


def test_preloaded(plain: Native) -> None:
    """The bare driver knows no hook; LD_PRELOAD brings it in."""
    preloaded = plain.run("basic", program="bare", LD_PRELOAD=str(plain.hook))
    assert preloaded == plain.run("basic")
    assert plain.run("basic", program="bare") == {}


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda p: p.stem)
def test_recorded_on_a_gpu(native: Native, recording: Path, tmp_path: Path) -> None:
    """Calls and answers of the real libraries under PyTorch's allocators."""
    *calls, ending = recording.read_text().splitlines()
    expected = json.loads(ending.removeprefix("# "))
    (tmp_path / "calls").write_text("\n".join(calls) + "\n")
    settings = {"SSDTRAIN_HOOK_MIN_BYTES": "0"}
    arguments = ("replay", str(tmp_path / "calls"))
    asked = sum(call.startswith("cudaMallocAsync ") for call in calls)
    counters = native.run(*arguments, **settings)
    assert counters["unregistered_async"] == asked
    assert counters["registered"] == expected["registered"] - asked
    for name in ("live", "live_bytes"):
        assert counters[name] == expected[name], name


READER = """
import ctypes, json, sys
from dataclasses import asdict
ctypes.CDLL({stubs!r}, ctypes.RTLD_GLOBAL)
from ssdtrain.storage import malloc_hook
hook = malloc_hook.loaded()
if hook is None:
    sys.exit(3)
process, address = ctypes.CDLL(None), ctypes.c_void_p()
for size in (4 << 20, 8 << 20, 4096):
    assert process.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)) == 0
print(json.dumps([hook.enabled, asdict(hook.counters())]))
"""


def test_counters_from_python(plain: Native) -> None:
    stubs = plain.directory / "libstubs.so"
    environment = {**os.environ, "SSDTRAIN_HOOK_CUFILE": str(stubs)}
    command = [sys.executable, "-c", READER.format(stubs=str(stubs))]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        command,
        env=malloc_hook.preload(environment, plain.hook),
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    enabled, counters = json.loads(done.stdout)
    assert enabled is True
    assert counters["registered"] == counters["live"] == 2
    assert counters["live_bytes"] == 12 << 20
    assert subprocess.run(command, env=environment, cwd=root).returncode == 3


def test_build_writes_one_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = malloc_hook.LIBRARY.build()
    assert path == malloc_hook.LIBRARY.path
    assert list(path.parent.iterdir()) == [path]
    assert malloc_hook.preload({"LD_PRELOAD": "/x.so"})["LD_PRELOAD"] == f"{path} /x.so"


def test_build_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for compiler, why in (
        ("no-such-cc", "no C compiler"),
        ("false", "false .* failed"),
    ):
        monkeypatch.setenv("CC", compiler)
        with pytest.raises(BuildError, match=why):
            malloc_hook.LIBRARY.build()
    with pytest.raises(BuildError, match="is missing; build it"):
        malloc_hook.preload({}, tmp_path / "x.so")
    assert not any(tmp_path.rglob("*.so"))


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_directory_of_others_is_refused(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is code: whoever can write it runs as its user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(directory, "_is_private_group", lambda _: False)
    path = malloc_hook.LIBRARY.build()
    path.parent.chmod(mode)
    with pytest.raises(ConfigError, match=r"ssdtrain is writable by others .*mode 700"):
        malloc_hook.preload({})
    path.unlink()
    with pytest.raises(ConfigError, match="writable by others"):
        malloc_hook.LIBRARY.build()
    assert list(path.parent.iterdir()) == []


def test_a_library_of_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(directory, "_is_private_group", lambda _: False)
    before = os.umask(0o002)
    try:
        path = malloc_hook.LIBRARY.build()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o722)
    with pytest.raises(ConfigError, match=r"\.so is writable by others"):
        malloc_hook.preload({})
    path.chmod(0o700)
    real = path.rename(tmp_path / "real.so")
    path.symlink_to(real)
    with pytest.raises(ConfigError, match=r"\.so is a symbolic link"):
        malloc_hook.preload({})
    command = [sys.executable, "-m", "ssdtrain", "env", "--preload", "always"]
    printed = subprocess.run(command, capture_output=True, text=True)
    assert printed.returncode != 0 and not printed.stdout


def test_a_library_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = malloc_hook.LIBRARY.build()
    own = os.geteuid()
    if own == 0:
        os.chown(path, 12_345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {own or 12_345}"):
        malloc_hook.preload({})
