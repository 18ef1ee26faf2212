//! Files of the log, read frame by frame: a log may be larger than the memory that is free.

use mooncake_base::{Error, ErrorCode, Result};

use crate::journal::{
    directory::{Directory, file_error, file_name},
    log_frame::{FRAME_BYTES, Frame, HEADER_BYTES, Header, Kind, frame_bytes},
};

/// Bytes that are read at a time, beside a frame that is larger.
const READ_BYTES: usize = 1 << 20;

/// A log file or snapshot.
pub(super) struct RecoveredFile {
    pub(super) name: String,
    pub(super) number: u64,
    /// `None`: the file ends in its header.
    pub(super) header: Option<Header>,
}

impl RecoveredFile {
    /// Opens a file and checks its header.
    ///
    /// # Errors
    /// The file cannot be read, or is not the one that its name says.
    pub(super) fn open(directory: &Directory, kind: Kind, number: u64) -> Result<Self> {
        let mut file = Self { name: file_name(kind, number), number, header: None };
        let bytes = file.part(directory, 0, HEADER_BYTES)?;
        file.header = Header::decode(&bytes).map_err(|error| {
            let folder = directory.path().display();
            let set_aside = format_args!("mv {folder} {folder}.old").to_string();
            let path = directory.path_of(&file.name);
            error.with("file", path.display()).with("set_aside_by", set_aside)
        })?;
        if let Some(header) = file.header
            && (header.kind, header.number) != (kind, number)
        {
            return Err(damaged_error(directory, &file, 0)
                .with("because", "its header does not match its name"));
        }
        Ok(file)
    }

    /// Returns the frames from a place in the file on, the first of which is behind the header.
    pub(super) fn frames_from<'a>(
        &'a self,
        directory: &'a Directory,
        place: usize,
    ) -> FrameReader<'a> {
        let offset = place as u64;
        FrameReader { directory, file: self, buffer: Vec::new(), start: 0, offset, is_read: false }
    }

    /// Returns whether one of the frames up to the first invalid one is meant, of so many.
    pub(super) fn any_frame(
        &self,
        directory: &Directory,
        count: usize,
        is_meant: impl Fn(&Frame<'_>) -> bool,
    ) -> Result<bool> {
        let mut frames = self.frames_from(directory, HEADER_BYTES);
        for _ in 0..count {
            let Some(frame) = frames.next_frame()? else { break };
            if is_meant(&frame) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the whole file. Only for one that is damaged, in which a frame may begin anywhere.
    pub(super) fn read_whole(&self, directory: &Directory) -> Result<Vec<u8>> {
        let read = directory.disk().read(&self.name);
        read.map_err(|source| self.read_error(directory, source))
    }

    fn part(&self, directory: &Directory, offset: u64, length: usize) -> Result<Vec<u8>> {
        let read = directory.disk().read_part(&self.name, offset, length);
        read.map_err(|source| self.read_error(directory, source))
    }

    fn read_error(&self, directory: &Directory, source: std::io::Error) -> Error {
        file_error("cannot be read", &directory.path_of(&self.name), source)
    }
}

/// The frames of a file, in order. Holds one of them at a time.
pub(super) struct FrameReader<'a> {
    directory: &'a Directory,
    file: &'a RecoveredFile,
    buffer: Vec<u8>,
    /// Bytes of the buffer that were returned.
    start: usize,
    /// The place in the file of the next frame.
    offset: u64,
    /// The buffer has the rest of the file.
    is_read: bool,
}

impl FrameReader<'_> {
    /// Returns the next frame; `None` at the end of the file and before an invalid frame.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn next_frame(&mut self) -> Result<Option<Frame<'_>>> {
        self.fill(FRAME_BYTES)?;
        if let Some(bytes) = frame_bytes(&self.buffer[self.start..]) {
            self.fill(bytes)?;
        }
        let Some(frame) = Frame::read(&self.buffer[self.start..]) else { return Ok(None) };
        self.start += frame.bytes();
        self.offset += frame.bytes() as u64;
        Ok(Some(frame))
    }

    /// Returns the place in the file behind the last frame.
    pub(super) fn offset(&self) -> usize {
        self.offset as usize
    }

    /// Returns whether no byte is left behind the last frame.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn is_at_end(&mut self) -> Result<bool> {
        self.fill(1)?;
        Ok(self.start == self.buffer.len())
    }

    /// Reads on until the buffer has so many bytes of the next frame, if the file has them.
    fn fill(&mut self, bytes: usize) -> Result<()> {
        let held = self.buffer.len() - self.start;
        if held >= bytes || self.is_read {
            return Ok(());
        }
        self.buffer.drain(..self.start);
        self.start = 0;
        let wanted = (bytes - held).max(READ_BYTES);
        let part = self.file.part(self.directory, self.offset + held as u64, wanted)?;
        self.is_read = part.len() < wanted;
        if self.buffer.is_empty() {
            // Gives the memory of an earlier, larger frame back.
            self.buffer = part;
        } else {
            self.buffer.extend_from_slice(&part);
        }
        Ok(())
    }
}

pub(super) fn damaged_error(directory: &Directory, file: &RecoveredFile, at: usize) -> Error {
    Error::new(
        ErrorCode::PERSISTENT_FAIL,
        "the log of the master is damaged; restore a good copy, or move the state directory away \
         to start with an empty pool",
    )
    .with("file", directory.path_of(&file.name).display())
    .with("offset", at)
}
