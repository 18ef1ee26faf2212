//! Memory that transfers fill before Python sees it: [`Buffer`], which owns the result of a get, and
//! `bytes`.
#![allow(unsafe_code, reason = "shares memory with Python")]

mod pages;

use std::{
    ffi::{CStr, c_int},
    ptr,
    sync::atomic::{AtomicUsize, Ordering},
};

use mooncake_transfer_engine::LocalRange;
use pyo3::{
    exceptions::{PyMemoryError, PyValueError},
    ffi,
    prelude::*,
    pyclass::CompareOp,
    types::{PyByteArray, PyBytes, PyDict, PyMemoryView},
};

use self::pages::Pages;
use crate::argument::Unsigned;

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
