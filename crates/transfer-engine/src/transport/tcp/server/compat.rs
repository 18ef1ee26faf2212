//! The established engine's frames, as the owner of the memory answers them.

use std::io;

use super::{
    Shared,
    connection::{Connection, RequestTimeout},
};
use crate::{
    piece::Opcode,
    transport::tcp::compat_frame::{HEADER_BYTES, Header, Status},
};

/// The most bytes of a refused write that are taken before the connection is closed. The peer
/// reads the refusal only after it has sent them; closing earlier may destroy it on its way.
const DISCARD_BYTES_MAX: u64 = 1 << 30;

/// Answers request after request, the first 8 bytes of which have been read already.
pub(super) async fn serve(
    mut connection: Connection,
    shared: &Shared,
    first: [u8; 8],
) -> io::Result<()> {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..8].copy_from_slice(&first);
    let mut filled = first.len();
    loop {
        let timeout = RequestTimeout::for_bytes(shared.settings.progress_timeout, 0);
        connection.read(&mut bytes[filled..], timeout).await?;
        let header = Header::decode(&bytes)?;
        if !answer(&mut connection, shared, &header).await? {
            return Ok(());
        }
        filled = connection.read_some(&mut bytes).await?;
        if filled == 0 {
            return Ok(());
        }
    }
}

/// Whether the connection goes on.
async fn answer(connection: &mut Connection, shared: &Shared, header: &Header) -> io::Result<bool> {
    let timeout = RequestTimeout::for_bytes(shared.settings.progress_timeout, header.range.length);
    let mut status = Status::Done;
    if !connection.add_range(&shared.regions, header.range) {
        shared.settings.refusals.count_range();
        status = Status::Refused;
        if header.opcode == Opcode::Write && header.range.length <= DISCARD_BYTES_MAX {
            connection.add_discard(header.range.length as usize);
        }
    }
    if header.opcode == Opcode::Write {
        if !connection.receive(timeout).await?.is_empty() {
            status = Status::Refused;
        }
        connection.release();
    }
    if header.has_status {
        connection.wire.extend_from_slice(&status.encode());
    }
    connection.send(timeout).await?;
    connection.release();
    Ok(status == Status::Done)
}
