//! Conversions between wire types and the types of the state.

use bytes::Bytes;
use mooncake_base::{Error, Incarnation, ReplicaId, Result, SegmentId};
use mooncake_proto::v1;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::check_name;
use crate::state::{
    DiskPlace, DiskSpec, JobStatus, ObjectState, Place, PutOptions, SegmentSpec, SegmentStatus,
    Selector, SoftPin, State, Tags, TaskKind, TaskStatus, disk_of,
};

/// The maximum number of replicas of one object.
const REPLICAS_MAX: u32 = 1024;

/// The maximum number of preferred segments of one put.
const PREFERRED_MAX: usize = 1024;

/// The segments that the places of one reply refer to, each stored once.
#[derive(Debug, Default)]
pub(super) struct SegmentTable {
    indices: FxHashMap<SegmentKey, u32>,
    segments: Vec<v1::Segment>,
    /// The last lookup. The next lookup is most often for the same segment.
    last: Option<(SegmentKey, u32)>,
}

/// The key that identifies a segment.
type SegmentKey = (SegmentId, Incarnation);

impl SegmentTable {
    /// Converts places. The state must be locked since it returned them.
    pub(super) fn places(&mut self, state: &State, places: &[Place]) -> Vec<v1::Place> {
        places.iter().map(|&place| self.place(state, place)).collect()
    }

    pub(super) fn into_segments(self) -> Vec<v1::Segment> {
        self.segments
    }

    /// Converts one place. The state must be locked since it returned the place.
    pub(super) fn place(&mut self, state: &State, place: Place) -> v1::Place {
        let spec = state.segment(place.segment).spec;
        v1::Place {
            segment: self.index((spec.id, spec.incarnation), || segment_to_wire(spec)),
            offset: place.offset,
            length: place.length,
            replica: place.replica.0,
        }
    }

    /// Converts the place of a copy on disk. The state must be locked since it returned the place.
    pub(super) fn disk_place(&mut self, state: &State, place: DiskPlace) -> v1::Place {
        let spec = disk_of(state, place.disk);
        let segment = self.index((spec.id, spec.incarnation), || disk_to_wire(spec));
        v1::Place { segment, offset: 0, length: 0, replica: place.replica.0 }
    }

    fn index(&mut self, key: SegmentKey, to_wire: impl FnOnce() -> v1::Segment) -> u32 {
        if let Some((_, index)) = self.last.filter(|(last, _)| *last == key) {
            return index;
        }
        let segments = &mut self.segments;
        let index = *self.indices.entry(key).or_insert_with(|| {
            segments.push(to_wire());
            u32::try_from(segments.len() - 1).expect("segments are fewer than items")
        });
        self.last = Some((key, index));
        index
    }
}

pub(super) fn segment_to_wire(spec: &SegmentSpec) -> v1::Segment {
    v1::Segment {
        id: Bytes::copy_from_slice(&spec.id.to_bytes()),
        incarnation: spec.incarnation.0,
        name: spec.name.clone(),
        endpoint: spec.endpoint.clone(),
        base: spec.base,
        length: spec.length,
        protocol: spec.protocol.clone(),
        kind: v1::SegmentKind::Memory.into(),
    }
}

pub(super) fn disk_to_wire(spec: &DiskSpec) -> v1::Segment {
    v1::Segment {
        id: Bytes::copy_from_slice(&spec.id.to_bytes()),
        incarnation: spec.incarnation.0,
        name: spec.name.clone(),
        endpoint: spec.address.clone(),
        base: 0,
        length: spec.capacity,
        protocol: "disk".to_owned(),
        kind: v1::SegmentKind::Disk.into(),
    }
}

pub(super) fn disk_from_wire(disk: &v1::Segment) -> Result<DiskSpec> {
    if disk.kind() != v1::SegmentKind::Disk {
        return Err(Error::invalid("the call describes memory, not a disk"));
    }
    let id = SegmentId::from_bytes(&disk.id).ok_or_else(|| {
        Error::invalid("the id of a disk has 16 bytes").with("bytes", disk.id.len())
    })?;
    check_name("disk", &disk.name)?;
    check_name("endpoint", &disk.endpoint)?;
    Ok(DiskSpec {
        id,
        incarnation: Incarnation(disk.incarnation),
        name: disk.name.clone(),
        address: disk.endpoint.clone(),
        capacity: disk.length,
    })
}

pub(super) fn segment_from_wire(segment: v1::Segment) -> Result<SegmentSpec> {
    let id = SegmentId::from_bytes(&segment.id).ok_or_else(|| {
        Error::invalid("a segment id has 16 bytes").with("bytes", segment.id.len())
    })?;
    check_name("segment", &segment.name)?;
    check_name("endpoint", &segment.endpoint)?;
    check_name("protocol", &segment.protocol)?;
    Ok(SegmentSpec {
        id,
        incarnation: Incarnation(segment.incarnation),
        name: segment.name,
        endpoint: segment.endpoint,
        base: segment.base,
        length: segment.length,
        protocol: segment.protocol,
    })
}

pub(super) fn segment_status(status: SegmentStatus) -> v1::SegmentStatus {
    match status {
        SegmentStatus::Ok => v1::SegmentStatus::Ok,
        SegmentStatus::Draining => v1::SegmentStatus::Draining,
        SegmentStatus::Drained => v1::SegmentStatus::Drained,
        SegmentStatus::GracefullyUnmounting => v1::SegmentStatus::GracefullyUnmounting,
        SegmentStatus::Unmounting => v1::SegmentStatus::Unmounting,
    }
}

pub(super) fn task_kind(kind: TaskKind) -> v1::TaskKind {
    match kind {
        TaskKind::Copy => v1::TaskKind::Copy,
        TaskKind::Move => v1::TaskKind::Move,
    }
}

pub(super) fn task_status(status: TaskStatus) -> v1::TaskStatus {
    match status {
        TaskStatus::Pending => v1::TaskStatus::Pending,
        TaskStatus::Processing => v1::TaskStatus::Processing,
        TaskStatus::Failed => v1::TaskStatus::Failed,
        TaskStatus::Success => v1::TaskStatus::Success,
    }
}

pub(super) fn job_status(status: JobStatus) -> v1::JobStatus {
    match status {
        JobStatus::Created => v1::JobStatus::Created,
        JobStatus::Planning => v1::JobStatus::Planning,
        JobStatus::Running => v1::JobStatus::Running,
        JobStatus::Succeeded => v1::JobStatus::Succeeded,
        JobStatus::Failed => v1::JobStatus::Failed,
        JobStatus::Canceled => v1::JobStatus::Canceled,
    }
}

pub(super) fn object_state(state: ObjectState) -> v1::ObjectState {
    match state {
        ObjectState::Absent => v1::ObjectState::Absent,
        ObjectState::Writing => v1::ObjectState::Writing,
        ObjectState::Complete => v1::ObjectState::Complete,
    }
}

/// Converts the replication config of a put; `None` means the defaults.
pub(super) fn put_options(config: Option<&v1::ReplicateConfig>) -> Result<PutOptions> {
    let Some(config) = config else { return Ok(PutOptions::default()) };
    if config.replica_num > REPLICAS_MAX {
        return Err(Error::invalid("too many replicas")
            .with("replica_num", config.replica_num)
            .with("limit", REPLICAS_MAX));
    }
    if config.preferred_segments.len() > PREFERRED_MAX {
        return Err(Error::invalid("too many preferred segments")
            .with("preferred_segments", config.preferred_segments.len())
            .with("limit", PREFERRED_MAX));
    }
    let soft_pin = match v1::SoftPin::try_from(config.soft_pin) {
        Ok(v1::SoftPin::Preserve) => SoftPin::Preserve,
        Ok(v1::SoftPin::Enable) => {
            SoftPin::Enable(config.soft_pin_ttl_ms.map(std::time::Duration::from_millis))
        }
        Ok(v1::SoftPin::Disable) => SoftPin::Disable,
        Err(_) => {
            return Err(Error::invalid("unknown soft pin mode").with("soft_pin", config.soft_pin));
        }
    };
    let data_type = u8::try_from(config.data_type)
        .map_err(|_| Error::invalid("unknown data type").with("data_type", config.data_type))?;
    Ok(PutOptions {
        replicas: config.replica_num.max(1),
        soft_pin,
        is_hard_pinned: config.with_hard_pin,
        preferred_segments: config.preferred_segments.clone(),
        is_same_node_preferred: config.prefer_same_node,
        data_type,
        ttl: config.ttl_ms.map(std::time::Duration::from_millis),
        tags: Tags::new(config.tags.iter().map(|tag| (&*tag.name, &*tag.value)))?,
    })
}

pub(super) fn tags_to_wire(tags: &Tags) -> Vec<v1::Tag> {
    let tag = |(name, value): (&str, &str)| v1::Tag { name: name.into(), value: value.into() };
    tags.iter().map(tag).collect()
}

pub(super) fn replicas(numbers: &[u64]) -> SmallVec<[ReplicaId; 1]> {
    numbers.iter().copied().map(ReplicaId).collect()
}

/// Converts a key selector. An empty selector is refused rather than taken for "all".
pub(super) fn selector(which: Option<&v1::KeySelector>) -> Result<Selector> {
    use v1::key_selector::By;
    match which.and_then(|which| which.by.as_ref()) {
        Some(By::All(true)) => Ok(Selector::All),
        Some(By::Regex(pattern)) => Selector::regex(pattern),
        Some(By::Prefix(prefix)) => Ok(Selector::Prefix(Box::from(&prefix[..]))),
        Some(By::All(false)) | None => Err(Error::invalid("the call has no key selector")),
    }
}
