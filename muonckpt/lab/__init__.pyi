"""The public names of the package, each with the module that it is imported from when it is first used."""

from .conformity.conform import (
    Conformity as Conformity,
    ConformityReport as ConformityReport,
    conform as conform,
)
from .forecasting.prospects import Prospect as Prospect, plan as plan
from .step_audit.step_audit import (
    ParameterVerdict as ParameterVerdict,
    StepAudit as StepAudit,
    audit_step as audit_step,
)
