"""A configuration in the formats of serving stacks, and back; what cannot be said is an error."""

from workbench.export.deployment import Deployment
from workbench.export.outcome import Exported, Imported, NotExpressible
from workbench.export.targets import TARGETS, export_all, export_config, import_config
from workbench.export.tau_profile import read_profile, write_profile

__all__ = [
    "TARGETS",
    "Deployment",
    "Exported",
    "Imported",
    "NotExpressible",
    "export_all",
    "export_config",
    "import_config",
    "read_profile",
    "write_profile",
]
