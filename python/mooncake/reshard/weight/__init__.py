"""Weights of a model: placements, bindings to memory, stored fragments, and transfer plans."""

from ..contracts import RuntimeBindingFragment
from ._axes import OwnershipAxis, ParallelRank, ReplicatedAxis, SplitAxis
from ._binding import (
    WeightRuntimeBindingManifest,
    validate_runtime_binding,
    validate_runtime_bindings,
)
from ._placement import WeightPlacementManifest, WeightPlacementPart
from ._placement_json import weight_placement_from_json, weight_placement_to_json
from ._plan import (
    LogicalTransferOperation,
    LogicalTransferPlan,
    PipelineRouteGroup,
    PlacementExecutorPlan,
)
from ._planner import (
    plan_placement_transfer,
    plan_placement_transfer_to_local_target,
    plan_stored_transfer_to_target_placement,
)
from ._region import PlanningLimits, TransferRegion
from ._stored import StoredFragment, WeightManifest
from ._tensor import PlacementFragment, TensorDescriptor
from ._topology import ParallelTopology, TopologyParticipant

# The order is upstream's, whose tests compare lists.
__all__ = [  # noqa: RUF022
    "ParallelRank",
    "ParallelTopology",
    "PlacementFragment",
    "WeightPlacementManifest",
    "WeightPlacementPart",
    "RuntimeBindingFragment",
    "WeightRuntimeBindingManifest",
    "SplitAxis",
    "ReplicatedAxis",
    "OwnershipAxis",
    "TensorDescriptor",
    "TopologyParticipant",
    "validate_runtime_binding",
    "validate_runtime_bindings",
    "weight_placement_from_json",
    "weight_placement_to_json",
    "StoredFragment",
    "WeightManifest",
    "LogicalTransferPlan",
    "LogicalTransferOperation",
    "PipelineRouteGroup",
    "PlacementExecutorPlan",
    "PlanningLimits",
    "TransferRegion",
    "plan_placement_transfer",
    "plan_placement_transfer_to_local_target",
    "plan_stored_transfer_to_target_placement",
]
