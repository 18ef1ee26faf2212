//! Reads: the records of a batch are looked up, read, and looked up again if they were moved.

use std::sync::Arc;

use super::Disk;
use crate::{
    extent::Extent,
    format::{Name, index::Entry},
    index::Place,
    memory::Destination,
    reader::{RecordRead, Verdict},
};

/// A record to read.
#[derive(Debug)]
pub struct Read<'a> {
    /// Its name.
    pub name: Name<'a>,
    /// Where the payload goes; of its length, which [`Disk::length`] returns.
    pub into: &'a mut [u8],
}

/// A record to read, or a range of it.
#[derive(Debug)]
pub struct ReadRequest<'a> {
    /// Its name.
    pub name: Name<'a>,
    /// The first byte of the payload to read.
    pub offset: u64,
    /// Where the bytes go, and how many there are. Blocks of 256 KiB that the range covers, and that
    /// go to an address which is a multiple of what [`Disk::direct_alignment`] returns, are read
    /// without a copy.
    pub into: Destination<'a>,
}

/// What became of a read. Only of [`ReadOutcome::Good`] do the bytes count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadOutcome {
    /// The memory holds the bytes, and the checksums of all blocks that they lie in hold.
    Good,
    /// There is no such record: none of this name, or of another version.
    Missing,
    /// The memory is of another length than the payload, or the range is not inside of it. This is
    /// the length of the payload.
    Length(u64),
    /// The record is damaged. It was dropped.
    Bad,
    /// The system could not read it. A later read may succeed.
    Failed(String),
}

/// Where the record of a request lies.
#[derive(Debug)]
struct Job {
    number: usize,
    extent: Arc<Extent>,
    place: Place,
}

impl Disk {
    /// Reads records as a whole; the outcomes are in the order of the reads.
    pub fn read(&self, reads: &mut [Read<'_>]) -> Vec<ReadOutcome> {
        let mut requests: Vec<_> = reads
            .iter_mut()
            .map(|read| ReadRequest { name: read.name, offset: 0, into: (&mut *read.into).into() })
            .collect();
        self.read_requests(&mut requests, |request, length| request.into.len() as u64 == length)
    }

    /// Reads ranges of records; the outcomes are in the order of the requests. All of them are in
    /// flight at the same time, as far as the ring or the threads of the directory reach. Blocks
    /// until the last is over: no memory is written to after that.
    pub fn read_batch(&self, requests: &mut [ReadRequest<'_>]) -> Vec<ReadOutcome> {
        self.read_requests(requests, |request, length| {
            let end = request.offset.checked_add(request.into.len() as u64);
            end.is_some_and(|end| end <= length)
        })
    }

    fn read_requests(
        &self,
        requests: &mut [ReadRequest<'_>],
        is_inside: impl Fn(&ReadRequest<'_>, u64) -> bool,
    ) -> Vec<ReadOutcome> {
        let mut outcomes = vec![ReadOutcome::Missing; requests.len()];
        let mut jobs = Vec::with_capacity(requests.len());
        {
            let mut state = self.state.lock();
            for (number, request) in requests.iter().enumerate() {
                let found = state.index.get(request.name);
                let Some(place) = found.filter(|found| found.version == request.name.version)
                else {
                    continue;
                };
                if !is_inside(request, place.length) {
                    outcomes[number] = ReadOutcome::Length(place.length);
                } else if let Some(extent) = state.extents.get(&place.extent).cloned() {
                    state.index.touch(request.name);
                    jobs.push(Job { number, extent, place });
                }
            }
        }
        while !jobs.is_empty() {
            let verdicts = self.read_places(requests, &mut jobs);
            jobs = jobs
                .into_iter()
                .zip(verdicts)
                .filter_map(|(job, verdict)| {
                    let request = &requests[job.number];
                    let (name, bytes) = (request.name, request.into.len() as u64);
                    match self.judge(name, bytes, job, verdict) {
                        Ok(job) => Some(job),
                        Err((number, outcome)) => {
                            outcomes[number] = outcome;
                            None
                        }
                    }
                })
                .collect();
        }
        outcomes
    }

    /// Reads records where they should lie; the verdicts are in the order of the jobs, which are put
    /// in that of the device.
    fn read_places(&self, requests: &mut [ReadRequest<'_>], jobs: &mut [Job]) -> Vec<Verdict> {
        // The device reads neighbours faster, and one file after the other.
        jobs.sort_by_key(|job| (job.place.extent, job.place.offset));
        let mut requests: Vec<_> = requests.iter_mut().map(Some).collect();
        let mut reads: Vec<_> = jobs
            .iter()
            .filter_map(|job| {
                let ReadRequest { name, offset, into } = requests[job.number].take()?;
                let (name, Place { offset: at, length, .. }) = (*name, job.place);
                let range = *offset..*offset + into.len() as u64;
                Some(RecordRead {
                    extent: job.extent.clone(),
                    entry: Entry { offset: at, length, name },
                    range,
                    into: Some(into.reborrow()),
                })
            })
            .collect();
        self.reader.read(&mut reads)
    }

    /// Returns the outcome of a read, or where to read again.
    fn judge(
        &self,
        name: Name<'_>,
        bytes: u64,
        mut job: Job,
        verdict: Verdict,
    ) -> Result<Job, (usize, ReadOutcome)> {
        match verdict {
            Verdict::Good { is_in_place } => {
                self.counters.read.increment();
                self.counters.read_bytes.add(bytes);
                self.counters.read_in_place.add(u64::from(is_in_place));
                return Err((job.number, ReadOutcome::Good));
            }
            Verdict::Mismatch => {}
            Verdict::Failed(why) => return Err((job.number, ReadOutcome::Failed(why))),
        }
        // Its extent may have been used again meanwhile: then it lies elsewhere, or nowhere.
        let mut state = self.state.lock();
        let missing = (job.number, ReadOutcome::Missing);
        let length = job.place.length;
        let place = state.index.get(name).filter(|place| place.version == name.version);
        let Some(place) = place.filter(|place| place.length == length) else { return Err(missing) };
        let Some(extent) = state.extents.get(&place.extent).cloned() else { return Err(missing) };
        if place == job.place && extent.mark == job.extent.mark {
            state.index.remove(name, place);
            self.counters.bad.increment();
            return Err((job.number, ReadOutcome::Bad));
        }
        (job.place, job.extent) = (place, extent);
        Ok(job)
    }
}
