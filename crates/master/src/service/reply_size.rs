//! The size of replies: the failures of many items are shortened, so that the reply to a call that
//! was executed always fits a frame. Refusals in greetings are shortened, too.

use mooncake_base::ErrorCode;
use mooncake_proto::v1::{self, response::Call};

/// Bytes of the texts and values of all failures in a reply that are sent in full. Short ones have
/// at most 96 bytes: those of the largest batch take 12 of the 16 MiB of a frame.
const FULL_BYTES_MAX: usize = 3 << 20;

/// The names of the values by which clients decide when to try again.
const KEPT_DETAILS: [&str; 2] = ["retry_after_ms", "moving_objects"];

/// The length of a value that short failures keep, in digits.
const KEPT_VALUE_BYTES_MAX: usize = 12;

/// More bytes than a short failure has beside its message.
pub(super) const SHORT_BYTES_MAX: usize = 128;

/// Shortens the failures of a reply: the first ones stay as they are, later ones name the code and
/// keep the values by which clients decide when to try again.
pub(super) fn shorten(reply: &mut Call) {
    let mut left = FULL_BYTES_MAX;
    let mut visit = |failure: &mut v1::Failure| {
        let bytes = text_bytes(failure);
        match left.checked_sub(bytes) {
            Some(rest) => left = rest,
            None => {
                left = 0;
                let code = ErrorCode::from_number(failure.code);
                let name = code.unwrap_or(ErrorCode::INTERNAL_ERROR).name();
                name.clone_into(&mut failure.message);
                shorten_failure(failure, name.len());
            }
        }
    };
    let mut each_of_columns = |failures: &mut Vec<v1::ItemFailure>| {
        failures.iter_mut().filter_map(|item| item.failure.as_mut()).for_each(&mut visit);
    };
    match reply {
        Call::PutStart(r) => r.columns.iter_mut().for_each(|c| each_of_columns(&mut c.failures)),
        Call::PutRenew(r) => r.columns.iter_mut().for_each(|c| each_of_columns(&mut c.failures)),
        Call::PutEnd(r) => r.columns.iter_mut().for_each(|c| each_of_columns(&mut c.failures)),
        Call::PutRevoke(r) => r.columns.iter_mut().for_each(|c| each_of_columns(&mut c.failures)),
        Call::Locate(r) => r.columns.iter_mut().for_each(|c| each_of_columns(&mut c.failures)),
        Call::Mount(r) => each(&mut r.results, |item| &mut item.failure, visit),
        Call::Unmount(r) => each(&mut r.results, |item| &mut item.failure, visit),
        Call::Remove(r) => each(&mut r.results, |item| &mut item.failure, visit),
        Call::SetExpiry(r) => each(&mut r.results, |item| &mut item.failure, visit),
        Call::EndTasks(r) => each(&mut r.results, |item| &mut item.failure, visit),
        Call::SetQuotas(r) => each(&mut r.results, |item| &mut item.failure, visit),
        Call::Describe(r) => each(&mut r.results, |item| &mut item.failure, visit),
        Call::CreateTasks(r) => each(&mut r.results, |item| &mut item.failure, visit),
        Call::QueryTasks(r) => each(&mut r.results, |item| &mut item.failure, visit),
        Call::CreateDrainJobs(r) => each(&mut r.results, |item| &mut item.failure, visit),
        Call::QueryDrainJobs(r) => each(&mut r.results, |item| &mut item.failure, visit),
        Call::CancelDrainJobs(r) => each(&mut r.results, |item| &mut item.failure, visit),
        Call::QueryQuotas(r) => each(&mut r.results, |item| &mut item.failure, visit),
        Call::Register(_)
        | Call::Heartbeat(_)
        | Call::Unregister(_)
        | Call::Verify(_)
        | Call::Probe(_)
        | Call::RemoveMatching(_)
        | Call::ListObjects(_)
        | Call::ListSegments(_)
        | Call::Status(_)
        | Call::FetchTasks(_)
        | Call::ClearReplicas(_)
        | Call::MountDisk(_)
        | Call::UnmountDisk(_)
        | Call::FetchOffloads(_)
        | Call::ReportRecords(_)
        | Call::Failure(_) => {}
    }
}

fn each<T>(
    items: &mut [T],
    failure_of: impl Fn(&mut T) -> &mut Option<v1::Failure>,
    visit: impl FnMut(&mut v1::Failure),
) {
    items.iter_mut().filter_map(|item| failure_of(item).as_mut()).for_each(visit);
}

/// Returns roughly the encoded size of the texts.
fn text_bytes(failure: &v1::Failure) -> usize {
    let values = failure.context.iter().map(|value| value.name.len() + value.value.len() + 8);
    failure.message.len() + values.sum::<usize>()
}

/// Shortens a failure: the message has at most so many bytes, and of the values only those stay by which
/// clients decide when to try again.
pub(super) fn shorten_failure(failure: &mut v1::Failure, message_bytes_max: usize) {
    let mut length = failure.message.len().min(message_bytes_max);
    while !failure.message.is_char_boundary(length) {
        length -= 1;
    }
    failure.message.truncate(length);
    failure.context.retain(|detail| {
        KEPT_DETAILS.contains(&&*detail.name) && detail.value.len() <= KEPT_VALUE_BYTES_MAX
    });
}

#[cfg(test)]
mod tests {
    use mooncake_base::Error;
    use mooncake_proto::native_frame::FRAME_BYTES_MAX;
    use prost::Message;

    use super::*;
    use crate::service::BATCH_ITEMS_MAX;

    /// Returns the failures of a reply with as many failed items, shortened.
    fn shortened(failure: &v1::Failure, count: usize) -> Vec<v1::Failure> {
        let results = vec![v1::ItemResult { failure: Some(failure.clone()) }; count];
        let mut reply = Call::Remove(v1::RemoveResponse { results });
        shorten(&mut reply);
        let Call::Remove(reply) = reply else { panic!("a removal") };
        reply.results.into_iter().map(|item| item.failure.unwrap()).collect()
    }

    #[test]
    fn late_failures_keep_code_and_retry_values() {
        let full = || Error::new(ErrorCode::NO_AVAILABLE_HANDLE, "no memory");
        let with_retry = |error: Error| error.with("moving_objects", 5).with("retry_after_ms", 77);
        let unfinished_put = Some(v1::UnfinishedPut { version: 3, request_id: 4, item: 5 });
        let error = with_retry(full().with("text", "x".repeat(1 << 20)));
        let failure = v1::Failure { unfinished_put, ..v1::Failure::from(&error) };
        let found = shortened(&failure, 4);
        assert_eq!(found[0], failure, "the first is whole");
        let short = v1::Failure {
            message: "NO_AVAILABLE_HANDLE".to_owned(),
            context: v1::Failure::from(&with_retry(full())).context,
            ..failure
        };
        assert_eq!(found[3], short);
    }

    #[test]
    fn largest_batch_of_failures_fits_a_frame() {
        let longest = "9".repeat(KEPT_VALUE_BYTES_MAX);
        let error = Error::new(ErrorCode::NO_AVAILABLE_HANDLE, "x".repeat(1000));
        let error = KEPT_DETAILS.iter().fold(error, |error, name| error.with(name, &longest));
        let failures =
            (0..).zip(shortened(&(&error).into(), BATCH_ITEMS_MAX)).map(|(item, failure)| {
                assert_eq!(failure.context.len(), KEPT_DETAILS.len());
                assert!(failure.encoded_len() - failure.message.len() <= SHORT_BYTES_MAX);
                v1::ItemFailure { item, failure: Some(failure) }
            });
        let columns = v1::DoneColumns { failures: failures.collect(), ..Default::default() };
        assert!(columns.encoded_len() <= FRAME_BYTES_MAX - (1 << 20));
    }
}
