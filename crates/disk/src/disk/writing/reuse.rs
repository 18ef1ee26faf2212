//! Reuse of extents: the records of an old one are moved or dropped.

use std::{collections::HashMap, io, sync::Arc};

use super::{Write, Writer};
use crate::{
    disk::{Disk, DiskState, place_of},
    extent::Extent,
    file_system::read_exact,
    format::{Layout, OwnedName, index::Entry},
};

/// The extents that are tried at once: a device that fails may take half a minute for each.
const VICTIMS_MAX: usize = 3;

/// The offset, length and name of a record.
type VictimRecord = (u64, u64, OwnedName);

/// An extent to use again.
#[derive(Debug)]
struct Victim {
    extent: Arc<Extent>,
    records: Vec<VictimRecord>,
    /// Why records may be missing from the list.
    failure: Option<io::Error>,
}

impl Victim {
    fn list(extent: Arc<Extent>) -> Self {
        let mut records = Vec::new();
        let scanned =
            extent.scan(|entry| records.push((entry.offset, entry.length, entry.name.to_owned())));
        Self { extent, records, failure: scanned.failure }
    }
}

impl Disk {
    /// Drops the records of an old extent. Those that were read are moved to the open one first, a
    /// quarter of an extent at most, and are on the device before the old place is given up.
    ///
    /// An extent whose list cannot be read is dropped as a whole and set aside, unless no other can be
    /// read either: then the device fails, perhaps for a time. The next call tries others.
    pub(super) fn drop_oldest(
        &self,
        writer: &mut Writer,
        evicted: &mut Vec<OwnedName>,
    ) -> io::Result<()> {
        let mut unreadable: Vec<Victim> = Vec::new();
        while unreadable.len() < VICTIMS_MAX {
            let tried: Vec<_> = unreadable.iter().map(|victim| victim.extent.number).collect();
            let Some(extent) = coldest(&self.state.lock(), writer, &tried) else { break };
            let victim = Victim::list(extent);
            if victim.failure.is_none() {
                self.drop_unreadable(writer, unreadable, evicted);
                return self.drop_records(writer, victim, evicted);
            }
            unreadable.push(victim);
        }
        // An extent of which a part can be read shows that the device works.
        let reads_some = unreadable.iter().any(|victim| !victim.records.is_empty());
        if unreadable.len() > 1 && !reads_some {
            writer.skipped.extend(unreadable.iter().map(|victim| victim.extent.number));
            return Err(unreadable.remove(0).failure.unwrap_or_else(none_readable));
        }
        if unreadable.is_empty() && !std::mem::take(&mut writer.skipped).is_empty() {
            return Err(none_readable());
        }
        unreadable.truncate(1);
        self.drop_unreadable(writer, unreadable, evicted);
        Ok(())
    }

    /// Drops all records of extents whose lists could not be read.
    fn drop_unreadable(
        &self,
        writer: &mut Writer,
        victims: Vec<Victim>,
        evicted: &mut Vec<OwnedName>,
    ) {
        for Victim { extent, records, failure } in victims {
            for (offset, length, name) in &records {
                let entry = Entry { offset: *offset, length: *length, name: name.borrow() };
                self.evict(entry.name, place_of(&extent, entry), evicted);
            }
            let unnamed = self.state.lock().remove_unnamed(extent.number);
            self.counters.evicted.add(unnamed);
            let path = self.directory.extent_path(extent.number);
            tracing::warn!(
                path = %path.display(),
                error = failure.map(tracing::field::display),
                unnamed,
                "a file of records cannot be read: its records are dropped"
            );
            self.set_aside(writer, (extent.number, extent.generation));
        }
    }

    fn drop_records(
        &self,
        writer: &mut Writer,
        victim: Victim,
        evicted: &mut Vec<OwnedName>,
    ) -> io::Result<()> {
        let Victim { extent: victim, records, .. } = victim;
        let mut budget = self.directory.identity().extent_bytes / 4;
        let mut has_moved = false;
        for (offset, length, name) in records {
            let entry = Entry { offset, length, name: name.borrow() };
            let place = place_of(&victim, entry);
            let is_touched = {
                let state = self.state.lock();
                if state.index.get(entry.name) != Some(place) {
                    continue;
                }
                state.index.is_touched(entry.name)
            };
            if is_touched && length <= budget && self.move_record(writer, &victim, entry)? {
                budget -= length;
                has_moved = true;
                continue;
            }
            self.evict(entry.name, place, evicted);
        }
        if has_moved && let Some(open) = &mut writer.open {
            open.sync()?;
        }
        writer.unused.push((victim.number, victim.generation));
        Ok(())
    }

    /// Writes a record anew; `false` if it is damaged or cannot be read, or if the open extent has no
    /// place.
    fn move_record(
        &self,
        writer: &mut Writer,
        from: &Extent,
        entry: Entry<'_>,
    ) -> io::Result<bool> {
        if !from.may_hold(entry) {
            return Ok(false);
        }
        let layout = Layout::of(entry.name, entry.length, from.unit());
        let mut payload = vec![0; entry.length as usize];
        let mut head = vec![0; layout.head_bytes as usize];
        let read = read_exact(&*from.file, &mut payload, entry.offset + layout.payload_at)
            .and_then(|()| read_exact(&*from.file, &mut head, entry.offset));
        let is_whole = || from.head_of(&head, entry).is_some_and(|head| head.holds_all(&payload));
        if read.is_err() || !is_whole() {
            return Ok(false);
        }
        let write = Write { name: entry.name, payload: &payload };
        let moved = self.append(writer, write, Some(place_of(from, entry)))?;
        self.counters.moved.add(u64::from(moved.is_some()));
        Ok(moved.is_some())
    }
}

fn none_readable() -> io::Error {
    io::Error::other("no file can be read whose records could make room")
}

/// Chooses among the oldest quarter of the sealed extents the one with the fewest bytes that were
/// read; none of those that were tried.
fn coldest(state: &DiskState, writer: &Writer, tried: &[u32]) -> Option<Arc<Extent>> {
    let open = writer.open.as_ref().map(|open| open.extent.number);
    let mut candidates: Vec<_> = state
        .extents
        .values()
        .filter(|extent| extent.generation != 0 && !writer.has_given_up(extent.number))
        .filter(|extent| Some(extent.number) != open)
        .filter(|extent| {
            !tried.contains(&extent.number) && !writer.skipped.contains(&extent.number)
        })
        .collect();
    candidates.sort_by_key(|extent| extent.generation);
    candidates.truncate(candidates.len().div_ceil(4));
    let mut touched: HashMap<u32, u64> = HashMap::new();
    state.index.for_each_touched(|extent, bytes| *touched.entry(extent).or_default() += bytes);
    let coldness = |extent: &&Arc<Extent>| {
        (touched.get(&extent.number).copied().unwrap_or_default(), extent.generation)
    };
    candidates.into_iter().min_by_key(coldness).cloned()
}
