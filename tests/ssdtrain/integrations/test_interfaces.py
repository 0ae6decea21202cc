"""The stand-ins of trainers keep to the interfaces that were recorded from the real
packages; `make integrations` compares the record with the wheel."""

import pytest

from tests.ssdtrain.integrations.interfaces import of_package, of_standin, recorded
from tests.ssdtrain.integrations.scripts import ONLY


@pytest.mark.parametrize("package", recorded())
def test_a_standin_keeps_to_its_record(package: str) -> None:
    record = recorded()[package]
    standin = of_standin(package)
    assert standin
    for name, parameters in standin.items():
        known = [each for each in record[name] if each in parameters]
        assert known == parameters, name


@pytest.mark.filterwarnings("ignore")  # the package's own, as it is imported
@pytest.mark.skipif(ONLY is None, reason="make integrations")
def test_the_record_is_what_the_package_says() -> None:
    assert ONLY is not None
    assert of_package(of_standin(ONLY)) == recorded()[ONLY]
