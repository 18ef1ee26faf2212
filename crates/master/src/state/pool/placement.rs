//! Placement policies: which segment a replica goes to.

use crate::state::{
    ids::SegmentSlot, pool::segment::Segments, random::Random, rules::AllocationStrategy,
};

/// Segments offered in random order before all are tried.
const RANDOM_OFFERS_MAX: usize = 100;

/// Segments compared per replica.
const SAMPLES_PER_REPLICA: usize = 6;

/// Protocol name of segments of CXL memory.
const CXL_PROTOCOL: &str = "cxl";

/// The put to place.
#[derive(Debug, Clone, Copy)]
pub(in crate::state) struct PlacementRequest<'a> {
    /// Host of the writer; empty if unknown or local ("localhost").
    pub(in crate::state) host: &'a str,
    /// Requested replicas.
    pub(in crate::state) replicas: u32,
}

/// An order over the segments that accept new objects.
pub(in crate::state) trait AllocationPolicy: std::fmt::Debug + Send {
    /// Appends segments in the order in which they should be tried. Segments left out are tried
    /// last; duplicates do no harm.
    fn order(
        &mut self,
        segments: &Segments,
        request: &PlacementRequest<'_>,
        order: &mut Vec<SegmentSlot>,
    );
}

/// Returns the policy of a strategy.
pub(in crate::state) fn policy(
    strategy: AllocationStrategy,
    seed: u64,
) -> Box<dyn AllocationPolicy> {
    let random = RandomOrder(Random::new(seed));
    match strategy {
        AllocationStrategy::Random => Box::new(random),
        // No segment reports a disk, so that only memory counts.
        AllocationStrategy::FreeRatioFirst | AllocationStrategy::SsdFreeRatioFirst => {
            Box::new(FreeRatioFirst(random.0))
        }
        AllocationStrategy::CxlFirst => Box::new(CxlFirst(random)),
        AllocationStrategy::LocalFirst => Box::new(LocalFirst(random)),
    }
}

/// All segments, starting at a random one.
#[derive(Debug)]
struct RandomOrder(Random);

impl AllocationPolicy for RandomOrder {
    fn order(
        &mut self,
        segments: &Segments,
        _ask: &PlacementRequest<'_>,
        order: &mut Vec<SegmentSlot>,
    ) {
        let open = segments.open();
        if open.is_empty() {
            return;
        }
        let start = self.0.below(open.len());
        order.extend(open[start..].iter().chain(&open[..start]).take(RANDOM_OFFERS_MAX));
    }
}

/// The emptiest segments of a random sample.
#[derive(Debug)]
struct FreeRatioFirst(Random);

impl AllocationPolicy for FreeRatioFirst {
    fn order(
        &mut self,
        segments: &Segments,
        request: &PlacementRequest<'_>,
        order: &mut Vec<SegmentSlot>,
    ) {
        let open = segments.open();
        if open.is_empty() {
            return;
        }
        let start = order.len();
        let samples = SAMPLES_PER_REPLICA * request.replicas as usize;
        if samples >= open.len() {
            order.extend(open);
        } else {
            order.extend((0..samples).map(|_| open[self.0.below(open.len())]));
        }
        let free_ratio = |&segment: &SegmentSlot| {
            let allocator = &segments.at(segment).allocator;
            let free = allocator.length() - allocator.used();
            // In parts per million, since integers are ordered.
            std::cmp::Reverse(u128::from(free) * 1_000_000 / u128::from(allocator.length().max(1)))
        };
        order[start..].sort_by_cached_key(free_ratio);
    }
}

/// The writer's host, then the hosts after it by name, around the circle.
#[derive(Debug)]
struct LocalFirst(RandomOrder);

impl AllocationPolicy for LocalFirst {
    fn order(
        &mut self,
        segments: &Segments,
        request: &PlacementRequest<'_>,
        order: &mut Vec<SegmentSlot>,
    ) {
        if request.replicas != 1 || request.host.is_empty() {
            return self.0.order(segments, request, order);
        }
        order.extend(segments.open_from(request.host));
    }
}

/// Segments of CXL memory, then any.
#[derive(Debug)]
struct CxlFirst(RandomOrder);

impl AllocationPolicy for CxlFirst {
    fn order(
        &mut self,
        segments: &Segments,
        request: &PlacementRequest<'_>,
        order: &mut Vec<SegmentSlot>,
    ) {
        let start = order.len();
        let is_cxl = |&&segment: &&SegmentSlot| segments.at(segment).spec.protocol == CXL_PROTOCOL;
        order.extend(segments.open().iter().filter(is_cxl));
        if order.len() > start {
            // Starts at another segment each time.
            let turn = self.0.0.below(order.len() - start);
            order[start..].rotate_left(turn);
        }
        self.0.order(segments, request, order);
    }
}
