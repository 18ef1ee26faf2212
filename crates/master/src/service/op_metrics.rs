//! Call counters: calls, items and failures per operation.

use mooncake_base::{ErrorCode, Result, counters};
use mooncake_proto::{calls::Method, v1::ItemResult};

/// An operation with its own counters: a call, or a part of the calls of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// The calls of one kind, without those that are counted as a part below.
    Call(Method),
    /// Removals of all objects.
    RemoveAll,
    /// Copies, item by item.
    CreateCopyTask,
    /// Moves, item by item.
    CreateMoveTask,
}

impl From<Method> for Op {
    fn from(method: Method) -> Self {
        Self::Call(method)
    }
}

impl Op {
    /// The number of values of [`Self::index`].
    pub const COUNT: usize = Method::ALL.len() + Self::PARTS.len();

    const PARTS: [Self; 3] = [Self::RemoveAll, Self::CreateCopyTask, Self::CreateMoveTask];

    /// Returns every operation with its name in the metrics (upstream's name, if upstream has the
    /// operation), and the name of its batches.
    pub fn all() -> impl Iterator<Item = (Self, &'static str, Option<&'static str>)> {
        let operations = Method::ALL.into_iter().map(Self::Call).chain(Self::PARTS);
        operations.filter_map(|op| op.metric_names().map(|(name, batch)| (op, name, batch)))
    }

    /// Returns the number of the operation among all.
    pub const fn index(self) -> usize {
        match self {
            Self::Call(method) => method as usize,
            Self::RemoveAll => Method::ALL.len(),
            Self::CreateCopyTask => Method::ALL.len() + 1,
            Self::CreateMoveTask => Method::ALL.len() + 2,
        }
    }

    /// Returns the name that durations and the slow log have, too.
    pub(crate) fn call_name(self) -> &'static str {
        match self {
            Self::Call(method) => method.name(),
            Self::RemoveAll => "remove_all",
            Self::CreateCopyTask => "create_copy_task",
            Self::CreateMoveTask => "create_move_task",
        }
    }

    /// Returns the name in the metrics, and that of batches; `None` for calls that are counted by
    /// their parts only.
    fn metric_names(self) -> Option<(&'static str, Option<&'static str>)> {
        let Self::Call(method) = self else { return Some((self.call_name(), None)) };
        let names = match method {
            Method::CreateTasks => return None,
            Method::Register => ("register_client", None),
            Method::Heartbeat => ("ping", None),
            Method::Unregister => ("unregister_client", None),
            Method::Mount => ("mount_segment", None),
            Method::Unmount => ("unmount_segment", None),
            Method::Locate => ("get_replica_list", Some("get_replica_list")),
            Method::Probe => ("exist_key", Some("exist_key")),
            Method::RemoveMatching => ("remove_by_regex", None),
            Method::QueryTasks => ("query_task", Some("query_task")),
            Method::EndTasks => ("update_task", None),
            Method::ClearReplicas => ("replica_clear", Some("replica_clear")),
            Method::CreateDrainJobs => ("create_drain_job", None),
            Method::QueryDrainJobs => ("query_drain_job", None),
            Method::CancelDrainJobs => ("cancel_drain_job", None),
            Method::SetQuotas => ("set_quota", None),
            Method::PutStart
            | Method::PutEnd
            | Method::PutRevoke
            | Method::Verify
            | Method::Remove => (method.name(), Some(method.name())),
            Method::PutRenew
            | Method::Describe
            | Method::SetExpiry
            | Method::ListObjects
            | Method::ListSegments
            | Method::Status
            | Method::FetchTasks
            | Method::MountDisk
            | Method::UnmountDisk
            | Method::FetchOffloads
            | Method::ReportRecords
            | Method::QueryQuotas => (method.name(), None),
        };
        Some(names)
    }
}

counters! {
    /// The counters of one operation. A call with one item counts as single, any other as a batch.
    struct OpCounters;
    /// A snapshot of the counters of one operation.
    #[derive(Copy)]
    pub struct OpCount {}
    METRICS {
        /// Calls with one item.
        single,
        /// Failed calls with one item.
        single_failed,
        /// Calls with several items, or none.
        batches,
        /// Batches in which every item failed.
        batches_failed,
        /// Batches in which some items failed.
        batches_partial,
        /// Items of batches.
        items,
        /// Failed items of batches.
        items_failed,
        /// Items of all calls that named an object that does not exist.
        /// They are among the failed ones, as upstream counts them.
        missed,
        /// Items of all calls that left an object as it was: the key had one already, or one of another
        /// version than the caller's condition. They are among the failed ones, as upstream counts them.
        kept,
    }
}

impl OpCount {
    /// Returns the calls, single ones and batches.
    pub fn calls(&self) -> u64 {
        self.single + self.batches
    }

    /// Returns the items of all calls.
    pub fn all_items(&self) -> u64 {
        self.single + self.items
    }

    /// Returns the items that failed, without those with an expected outcome.
    pub fn failures(&self) -> u64 {
        self.all_failed().saturating_sub(self.missed + self.kept)
    }

    /// Returns the items that failed, as upstream counts them.
    pub fn all_failed(&self) -> u64 {
        self.single_failed + self.items_failed
    }
}

/// The items of one call that have no result, by the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct FailedItems {
    /// All of them.
    all: usize,
    /// Those that named an object that does not exist.
    missed: usize,
    /// Those that left an object as it was.
    kept: usize,
}

impl FailedItems {
    /// Counts an item that failed with the code.
    pub(super) fn add(&mut self, code: ErrorCode) {
        self.all += 1;
        self.missed += usize::from(code == ErrorCode::OBJECT_NOT_FOUND);
        self.kept += usize::from(code == ErrorCode::OBJECT_ALREADY_EXISTS);
    }

    /// Counts the items that failed.
    pub(super) fn of(results: &[ItemResult]) -> Self {
        let failures = results.iter().filter_map(|result| result.failure.as_ref());
        failures.filter_map(|failure| ErrorCode::from_number(failure.code)).collect()
    }
}

impl FromIterator<ErrorCode> for FailedItems {
    fn from_iter<I: IntoIterator<Item = ErrorCode>>(codes: I) -> Self {
        let mut failed = Self::default();
        codes.into_iter().for_each(|code| failed.add(code));
        failed
    }
}

/// The counters of every operation.
#[derive(Debug)]
pub struct OpMetrics([OpCounters; Op::COUNT]);

impl Default for OpMetrics {
    fn default() -> Self {
        Self(std::array::from_fn(|_| OpCounters::default()))
    }
}

impl OpMetrics {
    /// Returns a snapshot of the counters of one operation.
    pub fn count(&self, op: impl Into<Op>) -> OpCount {
        self.0[op.into().index()].snapshot()
    }

    /// Runs and counts a call that has no items.
    pub(super) fn count_one<R>(
        &self,
        op: impl Into<Op>,
        call: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let result = call();
        self.count_batch(op, 1, usize::from(result.is_err()));
        result
    }

    /// Runs and counts the items, each as a call with one item.
    pub(super) fn count_each(
        &self,
        op: impl Into<Op>,
        items: impl Iterator<Item = Result<()>>,
    ) -> Vec<ItemResult> {
        let op = op.into();
        items
            .map(|result| {
                self.count_batch(op, 1, usize::from(result.is_err()));
                ItemResult::from(result)
            })
            .collect()
    }

    /// Counts one call with `items` items, of which some failed.
    pub(super) fn count_items(&self, op: impl Into<Op>, items: usize, failed: FailedItems) {
        let op = op.into();
        let counters = &self.0[op.index()];
        counters.missed.add_nonzero(failed.missed as u64);
        counters.kept.add_nonzero(failed.kept as u64);
        self.count_batch(op, items, failed.all);
    }

    /// Counts one call with `items` items, of which `failed` failed for a reason that no caller
    /// expects.
    pub(super) fn count_batch(&self, op: impl Into<Op>, items: usize, failed: usize) {
        let counters = &self.0[op.into().index()];
        if items == 1 {
            counters.single.increment();
            counters.single_failed.add_nonzero(failed as u64);
            return;
        }
        counters.batches.increment();
        counters.batches_failed.add_nonzero(u64::from(failed > 0 && failed == items));
        counters.batches_partial.add_nonzero(u64::from(failed > 0 && failed < items));
        counters.items.add_nonzero(items as u64);
        counters.items_failed.add_nonzero(failed as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operation_has_its_own_counters_and_name() {
        let mut indexes: Vec<_> = Op::all().map(|(op, ..)| op.index()).collect();
        indexes.push(Op::Call(Method::CreateTasks).index());
        indexes.sort_unstable();
        assert!(indexes.into_iter().eq(0..Op::COUNT));
        let names: std::collections::HashSet<_> = Op::all().map(|(_, name, _)| name).collect();
        assert_eq!(names.len(), Op::COUNT - 1);
    }

    #[test]
    fn counts_one_item_as_single_and_more_as_batch() {
        let metrics = OpMetrics::default();
        metrics.count_batch(Method::Probe, 1, 0);
        metrics.count_batch(Method::Probe, 1, 1);
        metrics.count_batch(Method::Probe, 3, 1);
        metrics.count_batch(Method::Probe, 2, 2);
        let count = metrics.count(Method::Probe);
        assert_eq!((count.single, count.single_failed), (2, 1));
        assert_eq!((count.batches, count.batches_partial, count.batches_failed), (2, 1, 1));
        assert_eq!((count.items, count.items_failed), (5, 3));
        assert_eq!((count.calls(), count.all_items(), count.failures()), (4, 7, 4));
        assert_eq!(metrics.count(Method::Remove), OpCount::default());
    }

    #[test]
    fn expected_outcomes_are_no_failures() {
        use ErrorCode as C;
        let metrics = OpMetrics::default();
        let codes = [C::OBJECT_NOT_FOUND, C::OBJECT_ALREADY_EXISTS, C::OBJECT_HAS_LEASE];
        metrics.count_items(Method::Remove, 5, codes.into_iter().collect());
        let count = metrics.count(Method::Remove);
        assert_eq!((count.missed, count.kept, count.failures()), (1, 1, 1));
        assert_eq!((count.items, count.items_failed), (5, 3), "as upstream counts");
    }
}
