//! Requests that involve device memory: they are staged through a pinned buffer, one chunk at a
//! time, together with the host memory of the same request.

use std::{io, mem};

use mooncake_base::{Clock, Error, SystemClock};

use super::{Connection, RequestTimeout};
use crate::{
    device::{BUFFER_BYTES, DeviceCopy, DeviceMemory, PinnedBuffer},
    memory::region::Pin,
    transfer_entry::Opcode,
    transport::tcp::vectored_io::Span,
};

/// The alignment of staged ranges in a buffer.
const ALIGNMENT: usize = 64;

/// A span of device memory.
#[derive(Debug)]
pub(super) struct DeviceSpan {
    /// The index among the spans of the request, where a discard span of the same length is the
    /// placeholder.
    pub(super) index: usize,
    pub(super) memory: DeviceMemory,
    /// Keeps the memory registered.
    pub(super) pin: Pin,
}

/// The part of a request that is moved with one filling of the buffer.
#[derive(Debug, Default)]
struct StagedChunk {
    spans: Vec<Span>,
    /// For each span, its index among the spans of the request.
    origins: Vec<usize>,
    copies: Vec<StagedCopy>,
}

/// A range of device memory that is staged through the buffer.
#[derive(Debug)]
struct StagedCopy {
    /// The index of the span in the request.
    origin: usize,
    memory: DeviceMemory,
    stretch: DeviceCopy,
    /// Held until the copy ends, even if its caller was dropped.
    _pin: Pin,
}

/// A position in a request: the index of a span and an offset in it.
type SpanPosition = (usize, usize);

impl Connection {
    /// Receives into spans that include device memory; see [`Connection::receive`].
    pub(super) async fn receive_staged(
        &mut self,
        timeout: RequestTimeout,
    ) -> io::Result<Vec<usize>> {
        let (spans, devices) = (mem::take(&mut self.spans), mem::take(&mut self.devices));
        let mut buffer = match self.acquire_buffer(&devices, timeout).await? {
            Ok(buffer) => buffer,
            Err(error) => {
                tracing::debug!(%error, "a write to device memory got no staging buffer");
                // The placeholders of the device spans discard their bytes.
                let mut spans = spans;
                let mut bad = self.receive_into(&mut spans, timeout).await?;
                bad.extend(devices.iter().map(|device| device.index));
                return Ok(bad);
            }
        };
        let (mut position, mut bad) = ((0, 0), Vec::new());
        while position.0 < spans.len() {
            let mut chunk = next_chunk(&spans, &devices, &buffer, &mut position);
            let faults = self.receive_into(&mut chunk.spans, timeout).await?;
            bad.extend(faults.into_iter().map(|index| chunk.origins[index]));
            let (back, refused) = self.copy_staged(Opcode::Write, chunk.copies, buffer).await?;
            buffer = back;
            bad.extend(refused.into_iter().map(|(origin, _)| origin));
        }
        bad.sort_unstable();
        bad.dedup();
        Ok(bad)
    }

    /// Sends `wire`, then spans that include device memory.
    pub(super) async fn send_staged(&mut self, timeout: RequestTimeout) -> io::Result<()> {
        let (spans, devices) = (mem::take(&mut self.spans), mem::take(&mut self.devices));
        let mut buffer = self.acquire_buffer(&devices, timeout).await?.map_err(io::Error::other)?;
        let mut position = (0, 0);
        while position.0 < spans.len() {
            let chunk = next_chunk(&spans, &devices, &buffer, &mut position);
            let (back, refused) = self.copy_staged(Opcode::Read, chunk.copies, buffer).await?;
            buffer = back;
            // The response announced bytes that cannot be read: only closing the connection can
            // signal that to the peer.
            if let Some((_, error)) = refused.into_iter().next() {
                return Err(io::Error::other(error));
            }
            self.send_from(&chunk.spans, timeout).await?;
        }
        Ok(())
    }

    async fn acquire_buffer(
        &self,
        devices: &[DeviceSpan],
        timeout: RequestTimeout,
    ) -> io::Result<Result<PinnedBuffer, Error>> {
        let memory = devices.first().map(|device| device.memory.clone());
        let memory =
            memory.ok_or_else(|| io::Error::other("the request has no span of device memory"))?;
        let deadline = SystemClock.now() + timeout.left();
        self.run_blocking(move || memory.buffer(deadline)).await
    }

    /// Copies between device memory and the buffer. Returns the buffer and, by span index, the
    /// errors of failed copies.
    async fn copy_staged(
        &self,
        opcode: Opcode,
        copies: Vec<StagedCopy>,
        buffer: PinnedBuffer,
    ) -> io::Result<(PinnedBuffer, Vec<(usize, Error)>)> {
        if copies.is_empty() {
            return Ok((buffer, Vec::new()));
        }
        self.run_blocking(move || {
            let stretches: Vec<_> = copies.iter().map(|one| one.stretch).collect();
            let is_one_device = copies.iter().all(|one| one.memory.is_same(&copies[0].memory));
            if is_one_device && copies[0].memory.copy(opcode, &stretches).is_ok() {
                return (buffer, Vec::new());
            }
            // Copied one by one, to find the failing ones.
            let refused = copies.iter().filter_map(|one| {
                let copied = one.memory.copy(opcode, &[one.stretch]);
                copied.err().map(|error| (one.origin, error))
            });
            let refused = refused.collect();
            (buffer, refused)
        })
        .await
    }
}

/// Builds the next chunk of a request, from `position` on.
fn next_chunk(
    spans: &[Span],
    devices: &[DeviceSpan],
    buffer: &PinnedBuffer,
    position: &mut SpanPosition,
) -> StagedChunk {
    let (mut chunk, mut at) = (StagedChunk::default(), 0);
    while position.0 < spans.len() {
        let (index, from) = *position;
        let span = spans[index];
        let Ok(device) = devices.binary_search_by_key(&index, |device| device.index) else {
            chunk.spans.push(span);
            chunk.origins.push(index);
            *position = (index + 1, 0);
            continue;
        };
        let device = &devices[device];
        let left = span.length() - from;
        let length = left.min(BUFFER_BYTES.saturating_sub(at));
        if length == 0 && left > 0 {
            return chunk;
        }
        if left == 0 {
            *position = (index + 1, 0);
            continue;
        }
        let pinned = buffer.range(at, length);
        // SAFETY: the buffer is mapped and used only by this request until the chunk was moved.
        chunk.spans.push(unsafe { Span::new(pinned.address(), length) });
        chunk.origins.push(index);
        chunk.copies.push(StagedCopy {
            origin: index,
            memory: device.memory.clone(),
            stretch: (device.pin.address() as u64 + from as u64, pinned),
            _pin: device.pin.clone(),
        });
        at = (at + length).next_multiple_of(ALIGNMENT);
        *position = if length == left { (index + 1, 0) } else { (index, from + length) };
    }
    chunk
}
