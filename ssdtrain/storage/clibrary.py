"""C of our own: built by the user's compiler, into the user's cache.

A source takes a few hundred milliseconds, once for each version of it.
(tests/ssdtrain/storage/test_clibrary.py)
"""

import hashlib
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ssdtrain.storage.directory import check_trusted, user_cache
from ssdtrain.versions import c_compiler

FLAGS = tuple(
    "-std=c11 -shared -fPIC -O2 -fvisibility=hidden -Wall -Wextra -Werror".split()
)


class BuildError(RuntimeError):
    """A library cannot be built; the text has the compiler's words."""


@dataclass(frozen=True)
class CLibrary:
    """A shared library of one source."""

    source: Path
    """Its own header, if there is one, has the same stem."""
    libraries: Sequence[str] = ()
    """Flags for the linker."""

    @property
    def path(self) -> Path:
        """Where `build` puts it: a name for each version of the source."""
        text = self.source.read_bytes()
        header = self.source.with_suffix(".h")
        if header.exists():
            text += header.read_bytes()
        digest = hashlib.sha256(text).hexdigest()[:12]
        name = f"{self.source.stem}-{os.uname().machine}-{digest}.so"
        return user_cache() / name

    def build(self) -> Path:
        """Compile it by `$CC`, or cc. Returns `path`.

        Raises:
            BuildError: no compiler, or it failed.
            ConfigError: others could write to the directory.
        """
        path, found = self.path, c_compiler()
        if found is None:
            name = os.environ.get("CC") or "cc"
            raise BuildError(f"no C compiler {name!r}; install one, or set CC")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_trusted(path.parent)
        # Written beside and renamed: processes that start together may all build.
        beside = path.with_suffix(f".{os.getpid()}.so")
        command = [found, *FLAGS, "-o", str(beside), str(self.source), *self.libraries]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise BuildError(f"{' '.join(command)} failed:\n{done.stderr}")
        beside.chmod(0o700)  # whatever the umask: it is loaded into other processes
        beside.replace(path)
        return path

    def built(self) -> Path:
        """Return the path of the library, built if it was not yet.

        Raises:
            BuildError: as `build`; or there is no place to write to.
            ConfigError: others could have written it.
        """
        try:
            path = self.path
            if not path.exists():
                return self.build()
        except BuildError:
            raise
        except (OSError, RuntimeError) as error:  # the second: a user without a home
            raise BuildError(str(error)) from error
        check_trusted(path)
        return path
