//! Memory that Python and transfers share: views of callers' buffers, bytes that are filled before
//! Python sees them, and [`Buffer`], which owns the result of a get.
//!
//! One of three files of this crate with unsafe code; the others are `collective` and `hostmem`.
#![allow(unsafe_code, reason = "shares memory with Python")]

use std::{
    ffi::{CStr, c_int},
    ptr,
    sync::atomic::{AtomicUsize, Ordering},
};

use mooncake_transfer_engine::LocalRange;
use pyo3::{
    Borrowed,
    buffer::PyUntypedBuffer,
    exceptions::{PyBufferError, PyMemoryError, PyTypeError, PyValueError},
    ffi,
    prelude::*,
    pyclass::CompareOp,
    types::{PyByteArray, PyBytes, PyDict, PyList, PyMemoryView, PyString, PyTuple},
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

/// From this size on the allocator maps new pages for each block, and unmaps them when it is freed.
const MAPPED_BLOCK_BYTES: usize = 32 << 20;

/// Lets the kernel back a large new block by huge pages. The transfer that fills the block then takes
/// a page fault for each 2 MiB rather than for each 4 KiB, which cost more than the copy itself.
fn prefer_huge_pages(block: &LocalRange) {
    if block.length() < MAPPED_BLOCK_BYTES {
        return;
    }
    mooncake_os::memory::prefer_huge_pages(block.address(), block.length());
}

/// Makes a `bytes` object with uninitialized content; returns it with the memory to fill. The
/// object must not be shown to Python before it is filled.
pub(crate) fn uninit_bytes(py: Python<'_>, length: u64) -> PyResult<(Py<PyBytes>, LocalRange)> {
    let length = isize::try_from(length).map_err(|_| PyMemoryError::new_err("object too large"))?;
    // SAFETY: a null source makes the content uninitialized; the caller fills it, as the doc
    // comment demands.
    let object = unsafe { ffi::PyBytes_FromStringAndSize(ptr::null(), length) };
    // SAFETY: the reference is new and owned by this call; null means that a Python error is set.
    let object = unsafe { Bound::from_owned_ptr_or_err(py, object) }?;
    let bytes = object.cast_into::<PyBytes>()?;
    // SAFETY: the object is a `bytes`, as the cast has just checked.
    let address = unsafe { ffi::PyBytes_AsString(bytes.as_ptr()) };
    // SAFETY: the object owns that many bytes and is alive until after the transfer. No reference
    // to its content exists, since only this call knows the object.
    let range = unsafe { LocalRange::held(address.cast(), length.unsigned_abs()) };
    prefer_huge_pages(&range);
    Ok((bytes.unbind(), range))
}

/// Bytes that own their memory; Python may read and write them without a copy.
#[pyclass(frozen, module = "mooncake", name = "Buffer")]
#[derive(Debug)]
pub(crate) struct Buffer {
    memory: Memory,
    length: usize,
    format: &'static CStr,
    /// Number of exported views.
    exports: AtomicUsize,
}

/// The memory of a [`Buffer`], which does not move.
#[derive(Debug)]
enum Memory {
    /// A vector with capacity but of length zero: its bytes are accessed through its address only.
    Heap(Vec<u8>),
    /// Whole pages.
    Pages(Pages),
}

impl Memory {
    fn address(&self) -> *mut u8 {
        match self {
            Self::Heap(bytes) => bytes.as_ptr().cast_mut(),
            Self::Pages(pages) => pages.address as *mut u8,
        }
    }
}

/// Private, anonymous pages, unmapped when dropped.
#[derive(Debug)]
struct Pages {
    address: usize,
    length: usize,
}

impl Pages {
    /// Maps zeroed pages that begin at a multiple of `alignment`, a power of two. `None` if there
    /// is no such memory.
    fn map(length: usize, alignment: usize) -> Option<Self> {
        let page = mooncake_os::memory::page_size();
        let length = length.checked_next_multiple_of(page)?;
        let spare = if alignment > page { alignment } else { 0 };
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let total = length.checked_add(spare)?;
        // SAFETY: the kernel chooses the address, so no existing mapping is replaced.
        let mapped = unsafe { libc::mmap(ptr::null_mut(), total, access, flags, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return None;
        }
        let mapped = mapped as usize;
        let whole = Self { address: mapped, length: total };
        // Without room for the alignment at the end of the address space the mapping is returned.
        let address = mapped.checked_next_multiple_of(alignment)?;
        std::mem::forget(whole);
        let pages = Self { address, length };
        // The unaligned ends are unmapped, so that only what is used takes address space.
        drop(Self { address: mapped, length: address - mapped });
        let end = address + length;
        drop(Self { address: end, length: mapped + total - end });
        Some(pages)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.length > 0 {
            // SAFETY: `map` mapped these whole pages for this value, and nothing refers to them:
            // a buffer outlives its views.
            unsafe { libc::munmap(self.address as *mut libc::c_void, self.length) };
        }
    }
}

impl Buffer {
    /// Makes an uninitialized buffer; returns it with the memory to fill. The buffer must not be
    /// shown to Python before it is filled.
    pub(crate) fn uninit(length: u64, is_signed: bool) -> PyResult<(Self, LocalRange)> {
        let refused =
            || PyMemoryError::new_err(format!("no memory for an object of {length} bytes"));
        let length = usize::try_from(length).map_err(|_| refused())?;
        let mut memory = Vec::new();
        memory.try_reserve_exact(length).map_err(|_| refused())?;
        // SAFETY: the vector owns the bytes and does not move or free them until it is dropped,
        // since it is never changed. No reference to them exists.
        let range = unsafe { LocalRange::held(memory.as_mut_ptr(), length) };
        prefer_huge_pages(&range);
        let format = if is_signed { c"b" } else { c"B" };
        Ok((Self::new(Memory::Heap(memory), length, format), range))
    }

    /// Makes a buffer of existing bytes.
    pub(crate) fn of(mut memory: Vec<u8>) -> Self {
        let length = memory.len();
        // The bytes stay in the vector's memory; from here on they are accessed through its
        // address.
        memory.clear();
        Self::new(Memory::Heap(memory), length, c"B")
    }

    const fn new(memory: Memory, length: usize, format: &'static CStr) -> Self {
        Self { memory, length, format, exports: AtomicUsize::new(0) }
    }

    /// Returns a copy as `bytes`. The buffer must be filled and not yet visible to Python.
    pub(crate) fn to_bytes(&self, py: Python<'_>) -> Py<PyBytes> {
        // SAFETY: the buffer owns the bytes, and the completed transfer has written them. Nothing
        // else can write them, since Python has not seen the buffer.
        let bytes = unsafe { std::slice::from_raw_parts(self.memory.address(), self.length) };
        PyBytes::new(py, bytes).unbind()
    }
}

#[pymethods]
impl Buffer {
    /// Returns zeroed memory whose address is a multiple of the page size and of `alignment`, a
    /// power of two. Pages take physical memory only when they are touched.
    #[staticmethod]
    #[pyo3(signature = (length, alignment = Unsigned(1)))]
    fn allocate(length: Unsigned, alignment: Unsigned) -> PyResult<Self> {
        let (length, alignment) = (length.0, alignment.0);
        if !alignment.is_power_of_two() {
            return Err(PyValueError::new_err("an alignment is a power of two"));
        }
        if length == 0 {
            return Ok(Self::new(Memory::Heap(Vec::new()), 0, c"B"));
        }
        let pages = Pages::map(length, alignment)
            .ok_or_else(|| PyMemoryError::new_err(format!("no memory of {length} bytes")))?;
        Ok(Self::new(Memory::Pages(pages), length, c"B"))
    }

    /// Number of exported views.
    #[getter]
    fn exports(&self) -> usize {
        self.exports.load(Ordering::Relaxed)
    }

    /// Returns the address of the first byte.
    fn ptr(&self) -> usize {
        self.memory.address() as usize
    }

    /// Returns the length in bytes.
    fn size(&self) -> usize {
        self.length
    }

    /// A view of the bytes.
    #[getter]
    fn buffer<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyMemoryView>> {
        PyMemoryView::from(slf)
    }

    fn __len__(&self) -> usize {
        self.length
    }

    fn __repr__(&self) -> String {
        format!("<mooncake.Buffer size={}>", self.length)
    }

    /// Returns the byte at an index, or a view of a slice.
    fn __getitem__<'py>(
        slf: &Bound<'py, Self>,
        index: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        PyMemoryView::from(slf)?.get_item(index)
    }

    /// Sets the byte at an index, or the bytes of a slice.
    fn __setitem__(
        slf: &Bound<'_, Self>,
        index: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        PyMemoryView::from(slf)?.set_item(index, value)
    }

    /// Compares the bytes with those of another buffer, or of an object of bytes.
    fn __eq__<'py>(
        slf: &Bound<'py, Self>,
        other: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let is_bytes = other.is_instance_of::<Self>()
            || other.is_instance_of::<PyBytes>()
            || other.is_instance_of::<PyByteArray>()
            || other.is_instance_of::<PyMemoryView>();
        if !is_bytes {
            return Ok(slf.py().NotImplemented().into_bound(slf.py()));
        }
        let bytes = |of: &Bound<'py, PyAny>| PyMemoryView::from(of)?.call_method1("cast", ("B",));
        bytes(slf)?.rich_compare(bytes(other)?, CompareOp::Eq)
    }

    /// Hashes the identity, as sets of handles need it: the bytes can change.
    fn __hash__(slf: &Bound<'_, Self>) -> usize {
        slf.as_ptr() as usize >> 4
    }

    /// Returns the memory as an array of bytes in a capsule, without a copy; needs numpy.
    #[pyo3(signature = (**options))]
    fn __dlpack__<'py>(
        slf: &Bound<'py, Self>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let array = slf.py().import("numpy")?.call_method1("asarray", (slf,))?;
        array.call_method("__dlpack__", (), options)
    }

    /// Returns kind and number of the device: the CPU.
    fn __dlpack_device__(&self) -> (u8, u8) {
        (1, 0)
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let buffer = slf.get();
        // SAFETY: Python passes a view to be filled. The object that the view keeps alive owns the
        // memory, whose address and length do not change.
        let failed = unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                buffer.memory.address().cast(),
                buffer.length.cast_signed(),
                0,
                flags,
            )
        };
        if failed != 0 {
            return Err(PyErr::fetch(slf.py()));
        }
        if flags & ffi::PyBUF_FORMAT != 0 {
            // SAFETY: the view was just filled, and the format string is static.
            unsafe { (*view).format = buffer.format.as_ptr().cast_mut() };
        }
        buffer.exports.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.exports.fetch_sub(1, Ordering::Relaxed);
    }
}
