//! The server's side of upstream's frames.

use std::io;

use super::{
    TcpServerShared,
    connection::{Connection, RequestTimeout},
};
use crate::{
    transfer_entry::Opcode,
    transport::tcp::compat_frame::{HEADER_BYTES, Header, Status},
};

/// The maximum payload of a refused write that is received and discarded before the connection is
/// closed. The peer reads the refusal only after sending its payload; an earlier close could
/// destroy the refusal in flight.
const DISCARD_BYTES_MAX: u64 = 1 << 30;

/// Serves request after request. The first 8 bytes of the first one were already read.
pub(super) async fn serve(
    mut connection: Connection,
    shared: &TcpServerShared,
    first: [u8; 8],
) -> io::Result<()> {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..8].copy_from_slice(&first);
    let mut filled = first.len();
    loop {
        let timeout = RequestTimeout::for_bytes(shared.settings.progress_timeout, 0);
        connection.read(&mut bytes[filled..], timeout).await?;
        let header = Header::decode(&bytes)?;
        connection.mark_known();
        if !answer(&mut connection, shared, &header).await? {
            return Ok(());
        }
        filled = connection.read_available(&mut bytes).await?;
        if filled == 0 {
            return Ok(());
        }
    }
}

/// Serves one request; returns whether the connection stays open.
async fn answer(
    connection: &mut Connection,
    shared: &TcpServerShared,
    header: &Header,
) -> io::Result<bool> {
    let timeout = RequestTimeout::for_bytes(shared.settings.progress_timeout, header.range.length);
    let mut status = Status::Done;
    if !connection.add_range(&shared.regions, header.range) {
        shared.settings.refusals.ranges.increment();
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
