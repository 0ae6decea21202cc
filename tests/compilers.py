"""Tests that build C: there is nothing to test where there is no compiler, and that
sessions do without is tested everywhere."""

import pytest

from ssdtrain.versions import c_compiler

HAS_COMPILER = c_compiler() is not None
needs_compiler = pytest.mark.skipif(
    not HAS_COMPILER, reason="no C compiler on this machine"
)
