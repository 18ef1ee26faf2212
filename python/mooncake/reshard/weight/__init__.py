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

__all__ = [
    "LogicalTransferOperation",
    "LogicalTransferPlan",
    "OwnershipAxis",
    "ParallelRank",
    "ParallelTopology",
    "PipelineRouteGroup",
    "PlacementExecutorPlan",
    "PlacementFragment",
    "PlanningLimits",
    "ReplicatedAxis",
    "RuntimeBindingFragment",
    "SplitAxis",
    "StoredFragment",
    "TensorDescriptor",
    "TopologyParticipant",
    "TransferRegion",
    "WeightManifest",
    "WeightPlacementManifest",
    "WeightPlacementPart",
    "WeightRuntimeBindingManifest",
    "plan_placement_transfer",
    "plan_placement_transfer_to_local_target",
    "plan_stored_transfer_to_target_placement",
    "validate_runtime_binding",
    "validate_runtime_bindings",
    "weight_placement_from_json",
    "weight_placement_to_json",
]
