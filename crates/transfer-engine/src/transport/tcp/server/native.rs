//! The server's side of the native frames.

use std::{io, sync::Arc, time::Instant};

use mooncake_base::ErrorCode;
use mooncake_os::dedicated_thread::BurstDetector;

use super::{
    TcpServerShared,
    connection::{Connection, RequestTimeout},
    dedicated_thread,
};
use crate::{
    transfer_entry::{Opcode, RemoteRange},
    transport::tcp::data_frame::{
        ENTRY_BYTES, REQUEST_BYTES, Refusal, RequestHeader, ResponseHeader, array, decode_entries,
    },
};

/// The minimum length of a request, which has at least one range. It is read in one call.
const FIRST_BYTES: usize = REQUEST_BYTES + ENTRY_BYTES;

/// The buffers that a connection reuses for each request.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    table: Vec<u8>,
    ranges: Vec<RemoteRange>,
    refusals: Vec<Refusal>,
}

/// The result of waiting for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Answered,
    /// No request arrived within the idle timeout; occurs only on a dedicated thread.
    Idle,
    /// The peer has closed the connection.
    Closed,
}

/// Serves request after request until the peer closes the connection.
pub(super) async fn serve(
    mut connection: Connection,
    shared: &Arc<TcpServerShared>,
) -> io::Result<()> {
    let mut scratch = Scratch::default();
    let mut bursts = BurstDetector::new(Instant::now());
    loop {
        if step(&mut connection, shared, &mut scratch).await? == Step::Closed {
            return Ok(());
        }
        if !bursts.record(Instant::now()) {
            continue;
        }
        if let Ok(permit) = Arc::clone(&shared.dedicated_threads).try_acquire_owned() {
            match dedicated_thread::serve(connection, Arc::clone(shared), scratch, permit).await? {
                Some(back) => (connection, scratch) = back,
                None => return Ok(()),
            }
        }
    }
}

/// Waits for a request and serves it.
pub(super) async fn step(
    connection: &mut Connection,
    shared: &TcpServerShared,
    scratch: &mut Scratch,
) -> io::Result<Step> {
    let mut first = [0; FIRST_BYTES];
    let filled = match connection.read_available(&mut first).await {
        Ok(0) => return Ok(Step::Closed),
        Ok(filled) => filled,
        Err(failure) if failure.kind() == io::ErrorKind::WouldBlock => return Ok(Step::Idle),
        Err(failure) => return Err(failure),
    };
    let timeout = RequestTimeout::for_bytes(shared.settings.progress_timeout, 0);
    connection.read(&mut first[filled..], timeout).await?;
    let header = RequestHeader::decode(&array(&first, 0))?;
    scratch.table.clear();
    scratch.table.resize(header.count * ENTRY_BYTES, 0);
    let (known, rest) = scratch.table.split_at_mut(ENTRY_BYTES);
    known.copy_from_slice(&first[REQUEST_BYTES..]);
    connection.read(rest, timeout).await?;
    decode_entries(&header, &scratch.table, &mut scratch.ranges)?;
    let timeout = RequestTimeout::for_bytes(shared.settings.progress_timeout, header.payload);
    answer(connection, shared, &header, scratch, timeout).await?;
    Ok(Step::Answered)
}

async fn answer(
    connection: &mut Connection,
    shared: &TcpServerShared,
    header: &RequestHeader,
    scratch: &mut Scratch,
    timeout: RequestTimeout,
) -> io::Result<()> {
    scratch.refusals.clear();
    for (index, range) in scratch.ranges.iter().enumerate() {
        if connection.add_range(&shared.regions, *range) {
            continue;
        }
        shared.settings.refusals.ranges.increment();
        scratch.refusals.push(Refusal { index, code: ErrorCode::TRANSFER_FAIL });
        if header.opcode == Opcode::Write {
            connection.add_discard(range.length as usize);
        }
    }
    if header.opcode == Opcode::Write {
        for index in connection.receive(timeout).await? {
            scratch.refusals.push(Refusal { index, code: ErrorCode::TRANSFER_FAIL });
        }
        scratch.refusals.sort_unstable_by_key(|refusal| refusal.index);
        connection.release();
    }
    let payload = connection.payload();
    let refused = scratch.refusals.len();
    let answer = ResponseHeader { sequence: header.sequence, refused, payload };
    answer.encode(&mut connection.wire);
    for refusal in &scratch.refusals {
        refusal.encode(&mut connection.wire);
    }
    connection.send(timeout).await?;
    connection.release();
    Ok(())
}
