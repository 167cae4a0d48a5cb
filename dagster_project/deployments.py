"""The resources of each deployment, by name; `IMAGEMILL_DEPLOYMENT` selects it (default `local`).

local        one machine, the data root from the command line or the environment
test         a data root given in code
production   like local, but the data root must be named, so that a service never works on ./data by accident
"""

import os
from collections.abc import Callable
from typing import Any

import dagster as dg

from imagemill.domain.layout import ROOT_VARIABLE
from imagemill.errors import WrongUsage
from io_managers.hardlink import HardlinkIOManager
from io_managers.jsonl import JsonlIOManager
from io_managers.npy import NpyIOManager
from io_managers.report import ReportIOManager
from io_managers.tar import TarIOManager
from resources.captioner import CaptionerResource
from resources.data_root import DataRootResource
from resources.encoders import Encoders
from resources.engine import ConfiguredEngine, LocalProcesses
from resources.summarizer import SummarizerResource

DEPLOYMENT_VARIABLE = "IMAGEMILL_DEPLOYMENT"

Resources = dict[str, Any]


def local_resources(path: str | None = None) -> Resources:
    """Return the resources of assets, IO managers and checks on one machine."""
    data_root = DataRootResource(path=path or "", config_file="", output_base_dir="")
    return {
        "data_root": data_root,
        "encoders": Encoders(data_root=data_root, overrides={}),
        "captioner": CaptionerResource(data_root=data_root),
        "summarizer": SummarizerResource(data_root=data_root, kind="", overrides={}),
        "engine": ConfiguredEngine(data_root=data_root, accept_node=""),
        # Hidden from the launchpad: each asset sets the number of workers from its own options.
        "processes": dg.ResourceDefinition.hardcoded_resource(LocalProcesses(workers=1)),
        "npy_io": NpyIOManager(data_root=data_root),
        "jsonl_io": JsonlIOManager(data_root=data_root),
        "tar_io": TarIOManager(data_root=data_root),
        "hardlink_io": HardlinkIOManager(data_root=data_root),
        "report_io": ReportIOManager(data_root=data_root),
    }


def test_resources(path: str) -> Resources:
    """Return the resources of a test, for a data root given in code."""
    return local_resources(path)


# pytest would collect it as a test in every module that imports it.
test_resources.__test__ = False  # pyright: ignore[reportFunctionMemberAccess]


def production_resources() -> Resources:
    """Return the resources of a service. Raises WrongUsage if the environment names no data root."""
    if not os.environ.get(ROOT_VARIABLE):
        raise WrongUsage(
            f"{ROOT_VARIABLE} is not set",
            where=f"{DEPLOYMENT_VARIABLE}=production",
            do="name the data root of this service",
        )
    return local_resources()


DEPLOYMENTS: dict[str, Callable[[], Resources]] = {"local": local_resources, "production": production_resources}


def chosen_resources() -> Resources:
    """Return the resources of the deployment that the environment names."""
    name = os.environ.get(DEPLOYMENT_VARIABLE, "local")
    if name not in DEPLOYMENTS:
        raise WrongUsage(
            f"unknown deployment {name!r}", where=DEPLOYMENT_VARIABLE, do=f"choose from {', '.join(DEPLOYMENTS)}"
        )
    return DEPLOYMENTS[name]()
