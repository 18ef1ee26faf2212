//! Parts of objects, read and written at once or by sessions of several calls.

use mooncake_base::ObjectKey;
use pyo3::{prelude::*, types::PyList};

use super::{Begun, Driver};
use crate::{
    argument::{Unsigned, call_with_valid, check_same_length, invalid_as_missing, object_keys},
    error::or_raise,
    options::PutOptions,
    store::{
        Keys, Store,
        outcome::{Absent, batch_options, done},
        parts::{self, Columns, PartTable},
    },
};

#[pymethods]
impl Store {
    /// Gets parts of objects into memory; returns for each key a list with the length of each part.
    #[pyo3(signature = (keys, bases, destinations, offsets, lengths, *, is_registered = false))]
    #[allow(clippy::too_many_arguments, reason = "columns of one table")]
    fn get_parts<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        bases: Vec<Unsigned>,
        destinations: Columns,
        offsets: Columns,
        lengths: Columns,
        is_registered: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let names = invalid_as_missing(object_keys(&keys)?);
        let table = PartTable::new(names, Some(bases), destinations, offsets, lengths);
        let table = or_raise(py, table)?;
        let open = self.open();
        let read = self.call(py, |client| {
            if is_registered {
                table.get_registered(client, open.pool().ok().flatten())
            } else {
                table.get(client)
            }
        })?;
        parts::lists(py, &keys, read)
    }

    /// Locates objects, for `read_begun`.
    fn begin_reads(&self, py: Python<'_>, keys: Keys<'_>) -> PyResult<Begun<Self>> {
        self.drive_for_keys(py, keys, |client, names| {
            done(call_with_valid(names, |names| client.sessions().begin_reads(&names)))
        })
    }

    /// Gets parts of objects that `begin_reads` located; returns the bytes read of each object.
    fn read_begun<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        addresses: Columns,
        offsets: Columns,
        lengths: Columns,
    ) -> PyResult<Begun<Self>> {
        let table = PartTable::new(object_keys(&keys)?, None, addresses, offsets, lengths);
        let table = or_raise(py, table)?;
        self.drive_each(py, keys, (), move |client, ()| table.read_begun(client))
    }

    /// Forgets the locations of objects that `begin_reads` located.
    fn end_reads(&self, py: Python<'_>, keys: Keys<'_>) -> PyResult<()> {
        let names: Vec<ObjectKey> = object_keys(&keys)?.into_iter().flatten().collect();
        self.call(py, |client| client.sessions().end_reads(&names))
    }

    /// Reserves space for objects of these lengths, for `write_begun`.
    #[pyo3(signature = (keys, lengths, *, options = None, is_upsert = false, if_absent = None))]
    fn begin_writes<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        lengths: Vec<Unsigned>,
        options: Option<&Bound<'py, PutOptions>>,
        is_upsert: bool,
        if_absent: Option<Absent<'py>>,
    ) -> PyResult<Begun<Self>> {
        or_raise(py, check_same_length("lengths", lengths.len(), keys.len()))?;
        let names = object_keys(&keys)?;
        let options = batch_options(py, options, is_upsert, keys.len(), if_absent.as_ref())?;
        self.drive_each(py, keys, (), move |client, ()| {
            parts::begin_writes(client, names, &lengths, options)
        })
    }

    /// Writes parts of objects that `begin_writes` reserved; returns the bytes written to each
    /// object.
    fn write_begun<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        addresses: Columns,
        offsets: Columns,
        lengths: Columns,
    ) -> PyResult<Begun<Self>> {
        let table = PartTable::new(object_keys(&keys)?, None, addresses, offsets, lengths);
        let table = or_raise(py, table)?;
        self.drive_each(py, keys, (), move |client, ()| table.write_begun(client))
    }

    /// Makes written objects readable, or gives their space back.
    #[pyo3(signature = (keys, *, is_revoked = false))]
    fn end_writes<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        is_revoked: bool,
    ) -> PyResult<Begun<Self>> {
        let names = object_keys(&keys)?;
        self.drive_each(py, keys, (), move |client, ()| {
            done(call_with_valid(names, |names| {
                let sessions = client.sessions();
                if is_revoked {
                    sessions.revoke_writes(&names)
                } else {
                    sessions.end_writes(&names)
                }
            }))
        })
    }
}
