//! Memory that callers lend to a call: the buffers of values, and memory that is named by its address.
#![allow(unsafe_code, reason = "names memory of Python objects to transfers")]

use mooncake_transfer_engine::LocalRange;
use pyo3::{
    Borrowed,
    buffer::PyUntypedBuffer,
    exceptions::{PyBufferError, PyTypeError},
    prelude::*,
    types::{PyBytes, PyList, PyString, PyTuple},
};

use crate::argument::Unsigned;

pyo3::create_exception!(
    mooncake._native,
    ObjectItemsError,
    PyTypeError,
    "The items of a buffer are Python objects."
);

/// A part of a value that has no buffer: memory of a device, or other memory at a bare address.
#[pyclass(frozen, module = "mooncake._native")]
#[derive(Debug)]
pub(crate) struct AddressRange {
    address: usize,
    length: usize,
    /// The object that keeps the memory.
    _owner: Py<PyAny>,
}

#[pymethods]
impl AddressRange {
    #[new]
    fn new(address: Unsigned, length: Unsigned, owner: Py<PyAny>) -> Self {
        Self { address: address.0, length: length.0, _owner: owner }
    }
}

/// The buffers of one value, held while a call reads them.
#[derive(Debug)]
pub(crate) struct Views {
    // Held for their destructors, which release the memory to its owners.
    views: Vec<PyUntypedBuffer>,
    addresses: Vec<Py<AddressRange>>,
    ranges: Vec<LocalRange>,
}

impl Views {
    /// Takes a view of one buffer, or of each buffer in a list or tuple.
    pub(crate) fn of(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut views = Self { views: Vec::new(), addresses: Vec::new(), ranges: Vec::new() };
        if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
            for part in value.try_iter()? {
                views.push(&part?)?;
            }
        } else {
            views.push(value)?;
        }
        Ok(views)
    }

    /// Takes a view of a buffer that is written.
    pub(crate) fn writable(buffer: &Bound<'_, PyAny>) -> PyResult<Self> {
        let views = Self::of(buffer)?;
        if views.is_readonly() {
            return Err(PyBufferError::new_err("the memory is read-only"));
        }
        Ok(views)
    }

    fn push(&mut self, part: &Bound<'_, PyAny>) -> PyResult<()> {
        let range = if let Ok(part) = part.cast::<AddressRange>() {
            self.addresses.push(part.clone().unbind());
            caller_range(part.get().address, part.get().length)
        } else {
            let view = view(part)?;
            // SAFETY: the view keeps the memory mapped until it is dropped, which is after the
            // call. A put only reads the bytes, so no reference to them is written through.
            let range = unsafe { LocalRange::held(view.buf_ptr().cast(), view.len_bytes()) };
            self.views.push(view);
            range
        };
        if range.length() > 0 {
            self.ranges.push(range);
        }
        Ok(())
    }

    fn is_readonly(&self) -> bool {
        self.views.iter().any(PyUntypedBuffer::readonly)
    }

    /// The memory in order, without empty buffers.
    pub(crate) fn ranges(&self) -> &[LocalRange] {
        &self.ranges
    }
}

/// The values of a batch with one buffer each, held while a call reads them.
#[derive(Debug)]
pub(crate) struct Values<'py> {
    // Held for their destructors, which release the memory to its owners.
    _bytes: Vec<Bound<'py, PyBytes>>,
    _views: Vec<PyUntypedBuffer>,
    ranges: Vec<LocalRange>,
}

impl<'py> Values<'py> {
    /// Takes a view of each value.
    pub(crate) fn of(values: &Bound<'py, PyAny>) -> PyResult<Self> {
        let count = values.len()?;
        let (mut bytes, mut views) = (Vec::with_capacity(count), Vec::new());
        let mut ranges = Vec::with_capacity(count);
        for value in values.try_iter()? {
            // The content of a `bytes` object does not move while the object lives, so it needs no
            // view.
            let (address, length) = match value?.cast_into_exact::<PyBytes>() {
                Ok(value) => {
                    let whole = value.as_bytes();
                    let place = (whole.as_ptr().cast_mut(), whole.len());
                    bytes.push(value);
                    place
                }
                Err(other) => {
                    let view = view(&other.into_inner())?;
                    let place = (view.buf_ptr().cast(), view.len_bytes());
                    views.push(view);
                    place
                }
            };
            // SAFETY: the view or the `bytes` object is kept in `self` until after the call, and
            // keeps the memory where it is. A put only reads it, so no reference to it is written
            // through.
            ranges.push(unsafe { LocalRange::held(address, length) });
        }
        Ok(Self { _bytes: bytes, _views: views, ranges })
    }

    /// The memory of each value.
    pub(crate) fn ranges(&self) -> &[LocalRange] {
        &self.ranges
    }
}

fn view(value: &Bound<'_, PyAny>) -> PyResult<PyUntypedBuffer> {
    if value.is_instance_of::<PyString>() {
        return Err(PyTypeError::new_err(
            "a value is a bytes-like object, not str; encode the text first",
        ));
    }
    let view = PyUntypedBuffer::get(value)?;
    if holds_objects(view.format().to_bytes()) {
        return Err(ObjectItemsError::new_err(
            "the items are Python objects, whose bytes are addresses of this process; pass bytes, \
             for instance of pickle.dumps(value)",
        ));
    }
    if !view.is_c_contiguous() {
        return Err(PyBufferError::new_err(
            "the value is not contiguous in memory; pass a copy, for instance \
             numpy.ascontiguousarray(value)",
        ));
    }
    Ok(view)
}

/// Returns whether a format of the buffer protocol has Python objects, also inside of a structure:
/// `O` is their code. The names of fields stand between colons.
#[pyfunction]
pub(crate) fn holds_objects(codes: &[u8]) -> bool {
    codes.split(|byte| *byte == b':').step_by(2).any(|codes| codes.contains(&b'O'))
}

/// The memory of each item of a batch, given by address: one `(address, length)` or a list of them
/// for each item.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    ranges: Vec<LocalRange>,
    /// End of each item in `ranges`.
    ends: Vec<usize>,
}

impl Ranges {
    /// Number of items.
    pub(crate) const fn len(&self) -> usize {
        self.ends.len()
    }

    /// The memory of each item, in order.
    pub(crate) fn items(&self) -> Vec<&[LocalRange]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, end)| &self.ranges[start..*end]).collect()
    }

    fn push(&mut self, pair: &Borrowed<'_, '_, PyAny>) -> PyResult<()> {
        let (address, length): (Unsigned, Unsigned) = pair.extract()?;
        // SAFETY: the memory is the caller's; no Rust reference to it exists.
        self.ranges.push(unsafe { LocalRange::foreign(address.0, length.0) });
        Ok(())
    }
}

impl<'py> FromPyObject<'_, 'py> for Ranges {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let mut ranges = Self::default();
        for item in object.try_iter()? {
            let item = item?;
            if item.is_instance_of::<PyTuple>() {
                ranges.push(&item.as_borrowed())?;
            } else {
                for pair in item.try_iter()? {
                    ranges.push(&pair?.as_borrowed())?;
                }
            }
            ranges.ends.push(ranges.ranges.len());
        }
        Ok(ranges)
    }
}

/// Returns address and length of a writable, contiguous buffer, which the caller keeps alive.
#[pyfunction]
pub(crate) fn writable_range(buffer: &Bound<'_, PyAny>) -> PyResult<(usize, usize)> {
    let view = view(buffer)?;
    if view.readonly() {
        return Err(PyBufferError::new_err("the memory is read-only"));
    }
    Ok((view.buf_ptr() as usize, view.len_bytes()))
}

/// Returns address and length of a contiguous buffer, which the caller keeps alive and only reads.
#[pyfunction]
pub(crate) fn readable_range(buffer: &Bound<'_, PyAny>) -> PyResult<(usize, usize)> {
    let view = view(buffer)?;
    Ok((view.buf_ptr() as usize, view.len_bytes()))
}

/// Returns memory that a caller named by addresses and lengths.
pub(crate) fn caller_ranges(ranges: Vec<(usize, usize)>) -> Vec<LocalRange> {
    ranges.into_iter().map(|(address, length)| caller_range(address, length)).collect()
}

/// Returns memory that a caller named by its address.
pub(crate) fn caller_range(address: usize, length: usize) -> LocalRange {
    // SAFETY: the memory is the caller's; no Rust reference to it exists.
    unsafe { LocalRange::foreign(address, length) }
}
