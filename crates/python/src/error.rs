//! Conversion of errors to Python: instances of the classes in `mooncake.errors`, and the last
//! error of each thread.

use std::cell::RefCell;

use mooncake_base::{
    Error, ErrorCode, ErrorKind, Result,
    engine_code::{ENGINE_CODES, EngineCodeRow},
    error::CODES,
    key::Printed,
};
use pyo3::{
    exceptions::PyRuntimeError,
    prelude::*,
    sync::PyOnceLock,
    types::{PyDict, PyString},
};

use crate::argument;

/// A row of the table of error codes: number, name, kind, remedy.
type CodeRow = (i32, &'static str, String, &'static str);

/// The exception class of each error kind, set by the package at import.
static CLASSES: PyOnceLock<Py<PyDict>> = PyOnceLock::new();

thread_local! {
    /// The last error, and a remedy of Python code that replaces its own.
    static LAST: RefCell<Option<(Error, Option<String>)>> = const { RefCell::new(None) };
}

/// Builds the exception for an error, with the key as its caller wrote it, and records the error as
/// the last one of this thread.
pub(crate) fn exception<'py>(
    py: Python<'py>,
    error: &Error,
    key: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    LAST.set(Some((error.clone(), None)));
    build(py, error, remedy(error), key)
}

/// Returns the exception for an error, to be raised.
pub(crate) fn py_error(py: Python<'_>, error: &Error) -> PyErr {
    py_error_for_key(py, error, None)
}

/// Returns the exception for an error about a key, to be raised.
pub(crate) fn py_error_for_key(
    py: Python<'_>,
    error: &Error,
    key: Option<&Bound<'_, PyAny>>,
) -> PyErr {
    match exception(py, error, key) {
        Ok(instance) => PyErr::from_value(instance),
        Err(failed) => failed,
    }
}

/// Returns the value, or raises the error.
pub(crate) fn or_raise<T>(py: Python<'_>, result: Result<T>) -> PyResult<T> {
    result.map_err(|error| py_error(py, &error))
}

/// Forgets the last error of this thread, since a call has succeeded.
pub(crate) fn forget_last() {
    LAST.with_borrow_mut(|last| {
        if last.is_some() {
            *last = None;
        }
    });
}

/// Returns the exception for the last error of this thread; `None` after a call that succeeded.
#[pyfunction]
pub(crate) fn last_error(py: Python<'_>) -> PyResult<Option<Bound<'_, PyAny>>> {
    let Some((error, own)) = LAST.with_borrow(Clone::clone) else { return Ok(None) };
    build(py, &error, own.as_deref().unwrap_or_else(|| remedy(&error)), None).map(Some)
}

/// Builds the exception for a failure found in Python code, and records it as the last one of this
/// thread. Its text ends with the values of `context`, and with the key. `remedy` replaces that of
/// the code.
#[pyfunction]
#[pyo3(signature = (code, text, *, key = None, context = None, remedy = None, is_closed = false))]
#[allow(clippy::too_many_arguments, reason = "each option is a keyword")]
pub(crate) fn failure<'py>(
    py: Python<'py>,
    code: i32,
    mut text: String,
    key: Option<Bound<'py, PyAny>>,
    context: Option<Bound<'py, PyDict>>,
    remedy: Option<String>,
    is_closed: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let mut values = Vec::new();
    for (name, value) in context.iter().flatten() {
        let (name, value) = (name.to_string(), value.to_string());
        text.push_str(&format!(" {name}={value}"));
        values.push((name, value));
    }
    if let Some(key) = &key {
        let shown = argument::with_bytes(key, |bytes| Printed(bytes).to_string())?;
        text.push_str(&format!(" key={shown}"));
        values.push((String::from("key"), shown));
    }
    let error = if is_closed {
        Error::closed(text)
    } else {
        let code = ErrorCode::from_number(code).unwrap_or(ErrorCode::INTERNAL_ERROR);
        Error::restored(code, text, values)
    };
    let shown = remedy.clone();
    LAST.set(Some((error.clone(), remedy)));
    build(py, &error, shown.as_deref().unwrap_or_else(|| self::remedy(&error)), key.as_ref())
}

/// Sets the exception class of each error kind. Only the first call has an effect.
#[pyfunction]
pub(crate) fn use_exceptions(py: Python<'_>, classes: Py<PyDict>) {
    // Set at import and not looked up on use: late during exit nothing can be imported.
    let _ = CLASSES.set(py, classes);
}

/// Returns every error code: number, name, kind, remedy. Codes of the engine have no kind.
#[pyfunction]
#[pyo3(signature = (*, is_engine = false))]
pub(crate) fn codes(is_engine: bool) -> Vec<CodeRow> {
    if is_engine {
        let to_row = |row: &EngineCodeRow| (row.number, row.name, String::new(), row.remedy);
        return ENGINE_CODES.iter().map(to_row).collect();
    }
    CODES.iter().map(|row| (row.code.number(), row.name, kind_name(row.kind), row.remedy)).collect()
}

// Touches only classes and attributes implemented in C: no Python code runs, so the thread cannot
// lose the interpreter on the way (see `detach`).
fn build<'py>(
    py: Python<'py>,
    error: &Error,
    remedy: &str,
    key: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let Some(classes) = CLASSES.get(py) else {
        return Err(PyRuntimeError::new_err(error.to_string()));
    };
    let class = classes.bind(py).as_any().get_item(kind_name(error.kind()))?;
    let instance = class.call1((error.to_string(),))?;
    instance.setattr("code", error.code().number())?;
    instance.setattr("code_name", error.code().name())?;
    instance.setattr("remedy", remedy)?;
    instance.setattr("key", key)?;
    let context = PyDict::new(py);
    for (name, value) in error.context() {
        // What the error itself names goes before what its causes name.
        if context.contains(name)? {
            continue;
        }
        // Texts show keys in quotes; values do not.
        match key {
            Some(key) if name == "key" && key.is_instance_of::<PyString>() => {
                context.set_item(name, key)?;
            }
            _ if name == "key" => context.set_item(name, unquoted(value))?,
            _ => context.set_item(name, value)?,
        }
    }
    instance.setattr("context", context)?;
    if !remedy.is_empty() {
        instance.setattr("__notes__", [remedy])?;
    }
    Ok(instance)
}

fn unquoted(text: &str) -> &str {
    text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text)
}

/// Returns the remedy, unless it only repeats that the message names the wrong argument.
fn remedy(error: &Error) -> &'static str {
    let is_general = error.kind() == ErrorKind::InvalidArgument
        && ErrorCode::INVALID_PARAMS.row().remedy == error.remedy();
    if is_general { "" } else { error.remedy() }
}

fn kind_name(kind: ErrorKind) -> String {
    format!("{kind:?}")
}
