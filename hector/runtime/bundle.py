"""Compiled kernels that travel: from a machine that made them into Triton's cache.

[Note: bundles] Triton keeps a kernel's machine code under a digest of all that decides
it: its text, the types of its arguments, Triton's and the assembler's own files, the
architecture and the options. A bundle is a zip file of such entries with a manifest,
which has the digest of Triton's files and one of each member. So a kernel that has
changed, or another Triton, finds nothing in a bundle and is compiled. Nothing tells
whether machine code does what its name says: a bundle is taken only from a file of the
user or of root that nobody else may write, and every member must have its digest.

Some versions of Triton run a C compiler as well, for the launcher of each signature and
for their driver's module: with kernels at hand, that is most of a first step. What a
machine with a GPU made of those travels too, by the same rules; Triton finds it by a
digest of the C text and by the Python it was made for, and where the host cannot load
it, Triton compiles its own.
"""

import base64
import hashlib
import json
import logging
import os
import re
import stat
import sysconfig
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hector.private_files import cache_directory, private_directory, write_private

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
MEMBER = re.compile(r"(?P<digest>[0-9a-f]{64})/(?P<name>hector_\w{1,100}\.\w{1,8})")
LAUNCHER = re.compile(
    r"host/(?P<digest>[0-9a-f]{64})/"
    r"(?P<name>(?:__triton_launcher|cuda_utils)\.[\w.-]{1,100}so)"
)
SCHEDULE = re.compile(r"schedules/[0-9a-f]{24}\.json")
MAX_MEMBER_BYTES = 1 << 26
SHIPPED = Path(__file__).parents[1] / "kernels"
"""Of whoever packs the package for machines that they know."""


class BundleError(ValueError):
    """A bundle that cannot be used."""


@dataclass(frozen=True)
class Added:
    """What `add` found in a bundle."""

    num_new: int
    num_known: int
    """Kernels that the cache already had."""
    num_schedules: int


def triton_build() -> str:
    """The digest of Triton's own files, which is in every kernel's digest."""
    from triton.runtime import cache

    if not hasattr(cache, "triton_key"):
        from triton.compiler import compiler

        return hashlib.sha256(compiler.triton_key().encode()).hexdigest()
    return hashlib.sha256(cache.triton_key().encode()).hexdigest()


def pack(out: Path, digests: Collection[str] | None = None) -> int:
    """Write the kernels of Triton's cache that hector generated into the bundle `out`,
    with all launchers and tuned schedules, or without them those of `digests`; how many
    kernels there are.

    Raises:
        BundleError: there are none, or not all of `digests`.
    """
    found = {d: files for d, files in _kept() if digests is None or d in digests}
    missing = len(set(digests or ()) - set(found))
    if not found or missing:
        raise BundleError(
            f"expected {missing or 'some'} kernels more in Triton's cache "
            f"{_triton_directory()}, got {len(found)}; train once, or compile them "
            f"with `hector kernels make`"
        )
    members: dict[str, bytes] = {}
    for digest, files in sorted(found.items()):
        members.update((f"{digest}/{p.name}", p.read_bytes()) for p in files)
    if digests is None:
        for digest, path in _launchers():
            members[f"host/{digest}/{path.name}"] = path.read_bytes()
        for path in sorted((cache_directory() / "schedules").glob("*.json")):
            members[f"schedules/{path.name}"] = path.read_bytes()
    manifest = {
        "format": FORMAT,
        "triton": _version(),
        "triton_build": triton_build(),
        "members": {n: hashlib.sha256(b).hexdigest() for n, b in members.items()},
    }
    written = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MANIFEST, json.dumps(manifest, indent=1))
        for name, data in members.items():
            archive.writestr(name, data)
    written.chmod(0o644)
    os.replace(written, out)
    return len(found)


def add(path: Path) -> Added:
    """Put the kernels of a bundle into Triton's cache, and its schedules into hector's.

    All is checked before the first is put there.

    Raises:
        BundleError: not a bundle, damaged, one that others could have written, or made
            by another Triton.
    """
    with _trusted(path) as file:
        members = _checked(path, file)
    by_digest: dict[str, dict[str, bytes]] = {}
    schedules: dict[str, bytes] = {}
    for name, data in members.items():
        match = MEMBER.fullmatch(name)
        if host := LAUNCHER.fullmatch(name):
            _put_launcher(host["digest"], host["name"], data)
        elif match is None:
            schedules[name.removeprefix("schedules/")] = data
        else:
            by_digest.setdefault(match["digest"], {})[match["name"]] = data
    new = [_put(digest, files) for digest, files in by_digest.items()]
    return Added(sum(new), len(new) - sum(new), sum(_add_schedules(schedules)))


def add_shipped() -> None:
    """Add the bundles of the package and of `$HECTOR_CACHE/kernels`, each once for each
    cache of Triton's; one that cannot be used is told of and left out."""
    own = cache_directory() / "kernels"
    for directory in (SHIPPED, own):
        for path in sorted(directory.glob("*.zip")):
            about = path.stat()
            known = hashlib.sha256(
                f"{path} {about.st_mtime_ns} {about.st_size} {triton_build()}".encode()
            )
            mark = _triton_directory() / f"hector-{known.hexdigest()[:24]}"
            if mark.exists():
                continue
            try:
                found = add(path)
            except BundleError as wrong:
                logger.warning("the kernels of %s are not used: %s", path, wrong)
                continue
            logger.info("%d kernels of %s are ready", found.num_new, path)
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch(mode=0o600)


def described(path: Path) -> dict[str, Any]:
    """The manifest of a bundle and the names of its kernels.

    Raises:
        BundleError: not a bundle, or damaged.
    """
    with _trusted(path) as file, zipfile.ZipFile(file) as archive:
        manifest = _manifest(path, archive)
    names = (MEMBER.fullmatch(n) for n in manifest["members"])
    kernels = {m["digest"]: m["name"].rpartition(".")[0] for m in names if m}
    return {**manifest, "kernels": kernels}


def _version() -> str:
    import triton

    version: str = triton.__version__
    return version


def _triton_directory() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)


def _kept() -> Iterator[tuple[str, tuple[Path, Path]]]:
    """Digest, and metadata and machine code, of the kept kernels of hector's."""
    for group in _triton_directory().glob("*/__grp__hector_*.json"):
        about = group.with_name(group.name.removeprefix("__grp__"))
        code = about.with_suffix(".cubin")
        if about.exists() and code.exists():
            yield _digest(group.parent), (about, code)


def _launchers() -> Iterator[tuple[str, Path]]:
    """Digest and file of what Triton's C compiler made for this Python."""
    end = sysconfig.get_config_var("EXT_SUFFIX")
    for name in ("__triton_launcher", "cuda_utils"):
        for path in sorted(_triton_directory().glob(f"*/{name}{end}")):
            yield _digest(path.parent), path


def _digest(directory: Path) -> str:
    """What a directory of Triton's cache is named for."""
    name = directory.name
    return base64.b32decode(name + "=" * (-len(name) % 8)).hex()


def _trusted(path: Path) -> BinaryIO:
    """The file, opened, if nobody but this user or root could have written it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as wrong:
        raise BundleError(f"cannot open {path}: {wrong}") from wrong
    file = os.fdopen(handle, "rb")
    about = os.fstat(handle)
    wrong_owner = about.st_uid not in (os.geteuid(), 0)
    if not stat.S_ISREG(about.st_mode) or wrong_owner or about.st_mode & 0o022:
        file.close()
        raise BundleError(
            f"expected {path} as a file of user {os.geteuid()} or root that nobody "
            f"else may write, got user {about.st_uid}, mode "
            f"{stat.S_IMODE(about.st_mode):04o}: machine code in it is executed"
        )
    return file


def _checked(path: Path, file: BinaryIO) -> dict[str, bytes]:
    """All members, each with its digest, of this process's own Triton."""
    try:
        with zipfile.ZipFile(file) as archive:
            manifest = _manifest(path, archive)
            if manifest["triton_build"] != triton_build():
                raise BundleError(
                    f"expected kernels of this Triton ({_version()}), got those of "
                    f"another build ({manifest['triton']}) in {path}; they would "
                    f"never be found. Make the bundle with this one"
                )
            members = _members(archive, manifest["members"])
    except (zipfile.BadZipFile, KeyError, EOFError, OSError) as wrong:
        raise BundleError(f"{path} is damaged: {wrong}") from wrong
    return members


def _manifest(path: Path, archive: zipfile.ZipFile) -> dict[str, Any]:
    """The manifest, if it is one."""
    try:
        found = json.loads(_read(archive, MANIFEST))
        good = (
            found["format"] == FORMAT
            and isinstance(found["triton_build"], str)
            and isinstance(found["triton"], str)
            and all(isinstance(d, str) for d in found["members"].values())
        )
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as wrong:
        raise BundleError(f"{path} is no bundle of kernels: {wrong}") from wrong
    if not good:
        raise BundleError(f"{path} is no bundle of kernels of format {FORMAT}")
    manifest: dict[str, Any] = found
    return manifest


def _members(archive: zipfile.ZipFile, digests: Mapping[str, str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name, digest in digests.items():
        if not any(kind.fullmatch(name) for kind in (MEMBER, LAUNCHER, SCHEDULE)):
            raise BundleError(
                f"expected kernels, launchers and schedules, got a member {name!r}"
            )
        data = _read(archive, name)
        if hashlib.sha256(data).hexdigest() != digest:
            raise BundleError(f"{name} is not what the manifest says; copy it again")
        found[name] = data
    return found


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > MAX_MEMBER_BYTES:
        raise BundleError(f"expected at most {MAX_MEMBER_BYTES} bytes in {name}")
    return archive.read(name)


def _put(digest: str, files: Mapping[str, bytes]) -> bool:
    """Whether the kernel was new to Triton's cache."""
    from triton.runtime.cache import get_cache_manager

    about = next((n for n in files if n.endswith(".json")), None)
    if about is None or len(files) != 2:
        raise BundleError(f"expected metadata and machine code of {digest}")
    manager = get_cache_manager(digest)
    if manager.get_group(about) is not None:
        return False
    manager.put_group(about, {n: manager.put(b, n) for n, b in files.items()})
    return True


def _put_launcher(digest: str, name: str, data: bytes) -> None:
    from triton.runtime.cache import get_cache_manager

    manager = get_cache_manager(digest)
    if manager.get_file(name) is None:
        manager.put(data, name, binary=True)


def _add_schedules(schedules: Mapping[str, bytes]) -> Iterable[bool]:
    """For each, whether it was new."""
    if not schedules:
        return
    directory = private_directory(cache_directory() / "schedules")
    for name, data in schedules.items():
        new = not (directory / name).exists()
        if new:
            write_private(directory / name, data.decode(errors="replace"))
        yield new
