//! Our own frames, as the owner of the memory answers them.

use std::io;

use mooncake_base::ErrorCode;

use super::{
    Shared,
    connection::{Connection, Pace},
};
use crate::{
    piece::{Opcode, RemoteRange},
    transport::tcp::frame::{
        AnswerHeader, ENTRY_BYTES, REQUEST_BYTES, Refusal, RequestHeader, array, decode_entries,
    },
};

/// A request has at least one range: so much can be read at once.
const FIRST_BYTES: usize = REQUEST_BYTES + ENTRY_BYTES;

/// What one connection reuses from request to request.
#[derive(Debug, Default)]
struct Scratch {
    table: Vec<u8>,
    ranges: Vec<RemoteRange>,
    refusals: Vec<Refusal>,
}

/// Answers request after request until the peer goes.
pub(super) async fn serve(mut connection: Connection, shared: &Shared) -> io::Result<()> {
    let mut scratch = Scratch::default();
    let mut first = [0; FIRST_BYTES];
    loop {
        let filled = connection.read_some(&mut first).await?;
        if filled == 0 {
            return Ok(());
        }
        let pace = Pace::of(shared.settings.progress_timeout, 0);
        connection.read(&mut first[filled..], pace).await?;
        let header = RequestHeader::decode(&array(&first, 0))?;
        scratch.table.clear();
        scratch.table.resize(header.count * ENTRY_BYTES, 0);
        let (known, rest) = scratch.table.split_at_mut(ENTRY_BYTES);
        known.copy_from_slice(&first[REQUEST_BYTES..]);
        connection.read(rest, pace).await?;
        decode_entries(&header, &scratch.table, &mut scratch.ranges)?;
        let pace = Pace::of(shared.settings.progress_timeout, header.payload);
        answer(&mut connection, shared, &header, &mut scratch, pace).await?;
    }
}

async fn answer(
    connection: &mut Connection,
    shared: &Shared,
    header: &RequestHeader,
    scratch: &mut Scratch,
    pace: Pace,
) -> io::Result<()> {
    scratch.refusals.clear();
    for (index, range) in scratch.ranges.iter().enumerate() {
        if connection.add(&shared.regions, *range) {
            continue;
        }
        shared.settings.refusals.count_range();
        scratch.refusals.push(Refusal { index, code: ErrorCode::TRANSFER_FAIL });
        if header.opcode == Opcode::Write {
            connection.add_void(range.length as usize);
        }
    }
    if header.opcode == Opcode::Write {
        for index in connection.receive(pace).await? {
            scratch.refusals.push(Refusal { index, code: ErrorCode::TRANSFER_FAIL });
        }
        scratch.refusals.sort_unstable_by_key(|refusal| refusal.index);
        connection.release();
    }
    let payload = connection.payload();
    let refused = scratch.refusals.len();
    let answer = AnswerHeader { sequence: header.sequence, refused, payload };
    answer.encode(&mut connection.wire);
    for refusal in &scratch.refusals {
        refusal.encode(&mut connection.wire);
    }
    connection.send(pace).await?;
    connection.release();
    Ok(())
}
