"""The participants of a placement and the sizes of its parallel axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from .._checks import (
    content_id,
    require_distinct,
    require_integer,
    require_items,
    require_text,
    set_fields,
)
from ..contracts import ParticipantId, TopologyId
from ._axes import AXIS_KINDS, ParallelAxisKind, ParallelRank

__all__ = [
    "ParallelTopology",
    "TopologyParticipant",
]


@dataclass(frozen=True)
class TopologyParticipant:
    """A process of a parallel job, and its rank."""

    participant_id: ParticipantId
    rank: ParallelRank

    def __post_init__(self) -> None:
        require_text(self.participant_id, "participant_id")
        if not isinstance(self.rank, ParallelRank):
            kind = type(self.rank).__name__
            raise ValueError(f"topology participant rank must be a ParallelRank, not {kind}")


@dataclass(frozen=True, init=False)
class ParallelTopology:
    """The participants of a parallel job, in the order of their ids.

    A topology may have fewer participants than the product of its sizes: an axis may overlay
    another one. The id is computed from the content.

    Raises:
        ValueError: There is no participant, an id or a rank repeats, a rank is beyond its axis,
            or `topology_id` is given and does not belong to the content.
    """

    tp_size: int
    pp_size: int
    ep_size: int
    dp_size: int
    participants: tuple[TopologyParticipant, ...]
    topology_id: TopologyId

    def __init__(
        self,
        *,
        tp_size: int,
        pp_size: int,
        ep_size: int,
        dp_size: int,
        participants: tuple[TopologyParticipant, ...],
        topology_id: TopologyId | None = None,
    ) -> None:
        sizes = {"tp_size": tp_size, "pp_size": pp_size, "ep_size": ep_size, "dp_size": dp_size}
        for name, size in sizes.items():
            require_integer(size, name, minimum=1)
        members = require_items(participants, "ParallelTopology participants", TopologyParticipant)
        members = tuple(sorted(members, key=lambda member: member.participant_id))
        set_fields(self, **sizes, participants=members)
        self._validate_participants()
        computed = content_id({"schema": "weight-parallel-topology", **self.content()})
        if topology_id is not None and topology_id != computed:
            raise ValueError(
                f"topology_id does not match canonical topology: {topology_id!r}, not {computed}"
            )
        set_fields(self, topology_id=TopologyId(computed))

    def _validate_participants(self) -> None:
        if not self.participants:
            raise ValueError("a topology must have at least one participant")
        require_distinct([member.participant_id for member in self.participants], "participant_id")
        require_distinct([member.rank for member in self.participants], "participant rank")
        for member in self.participants:
            for kind in AXIS_KINDS:
                rank, size = member.rank.on(kind), self.size(kind)
                if rank >= size:
                    raise ValueError(
                        f"{kind} rank is out of range for participant {member.participant_id}: "
                        f"rank={rank} size={size}"
                    )

    @property
    def world_size(self) -> int:
        """The number of participants."""
        return len(self.participants)

    def size(self, kind: ParallelAxisKind) -> int:
        """Return the size of one axis."""
        return cast("int", getattr(self, f"{kind}_size"))

    def participant(self, participant_id: ParticipantId) -> TopologyParticipant:
        """Return the participant with an id.

        Raises:
            ValueError: There is none.
        """
        for member in self.participants:
            if member.participant_id == participant_id:
                return member
        raise ValueError(f"the topology has no such participant: participant_id={participant_id!r}")

    def content(self) -> dict[str, object]:
        """Return the fields, without the id, as they are written to JSON."""
        return {
            "dp_size": self.dp_size,
            "ep_size": self.ep_size,
            "participants": [
                {
                    "participant_id": member.participant_id,
                    "rank": {kind: member.rank.on(kind) for kind in AXIS_KINDS},
                }
                for member in self.participants
            ],
            "pp_size": self.pp_size,
            "tp_size": self.tp_size,
        }
