//! Failures as Python sees them: instances of the classes in `mooncake.errors`, and the last one
//! of each thread.

use std::cell::RefCell;

use mooncake_base::{
    Error, ErrorCode, ErrorKind, Result,
    engine_code::{ENGINE_CODES, EngineCodeRow},
    error::CODES,
};
use pyo3::{exceptions::PyRuntimeError, prelude::*, sync::PyOnceLock, types::PyDict};

/// A row of the table of codes: number, name, kind, remedy.
type Row = (i32, &'static str, String, &'static str);

/// The class of each kind, once the package has told.
static CLASSES: PyOnceLock<Py<PyDict>> = PyOnceLock::new();

thread_local! {
    static LAST: RefCell<Option<Error>> = const { RefCell::new(None) };
}

/// The exception that tells of a failure, with the key as its caller wrote it. The thread
/// remembers the failure.
pub(crate) fn exception<'py>(
    py: Python<'py>,
    error: &Error,
    key: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    LAST.set(Some(error.clone()));
    build(py, error, key)
}

/// The exception, to be raised.
pub(crate) fn py_error(py: Python<'_>, error: &Error) -> PyErr {
    py_error_for_key(py, error, None)
}

/// The same, of a key.
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

/// The value, or the failure raised.
pub(crate) fn or_raise<T>(py: Python<'_>, result: Result<T>) -> PyResult<T> {
    result.map_err(|error| py_error(py, &error))
}

/// The exception that tells of the last failure in this thread.
#[pyfunction]
pub(crate) fn last_error(py: Python<'_>) -> PyResult<Option<Bound<'_, PyAny>>> {
    LAST.with_borrow(Clone::clone).map(|error| build(py, &error, None)).transpose()
}

/// Makes the exception for a failure that was found in Python, and remembers it.
#[pyfunction]
#[pyo3(signature = (code, text, *, key = None, is_closed = false))]
pub(crate) fn failure<'py>(
    py: Python<'py>,
    code: i32,
    text: String,
    key: Option<Bound<'py, PyAny>>,
    is_closed: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let error = if is_closed {
        Error::closed(text)
    } else {
        let code = ErrorCode::from_number(code).unwrap_or(ErrorCode::INTERNAL_ERROR);
        Error::new(code, text)
    };
    exception(py, &error, key.as_ref())
}

/// Says which class of exceptions is for which kind of failure. The first time counts.
#[pyfunction]
pub(crate) fn use_exceptions(py: Python<'_>, classes: Py<PyDict>) {
    // Given at import and not looked up when wanted: late in the exit nothing can be imported.
    let _ = CLASSES.set(py, classes);
}

/// Every code: number, name, kind, remedy. Those of the engine have no kind.
#[pyfunction]
#[pyo3(signature = (*, is_engine = false))]
pub(crate) fn codes(is_engine: bool) -> Vec<Row> {
    if is_engine {
        let told = |row: &EngineCodeRow| (row.number, row.name, String::new(), row.remedy);
        return ENGINE_CODES.iter().map(told).collect();
    }
    CODES.iter().map(|row| (row.code.number(), row.name, kind_name(row.kind), row.remedy)).collect()
}

// Only classes and attributes implemented in C are touched here: no Python code runs, so the
// thread cannot lose the interpreter on the way (see `detach`).
fn build<'py>(
    py: Python<'py>,
    error: &Error,
    key: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let Some(classes) = CLASSES.get(py) else {
        return Err(PyRuntimeError::new_err(error.to_string()));
    };
    let class = classes.bind(py).as_any().get_item(kind_name(error.kind()))?;
    let instance = class.call1((error.to_string(),))?;
    instance.setattr("code", error.code().number())?;
    instance.setattr("code_name", error.code().name())?;
    instance.setattr("remedy", error.remedy())?;
    instance.setattr("key", key)?;
    let context = PyDict::new(py);
    for (name, value) in error.context() {
        context.set_item(name, value)?;
    }
    instance.setattr("context", context)?;
    instance.setattr("__notes__", [error.remedy()])?;
    Ok(instance)
}

fn kind_name(kind: ErrorKind) -> String {
    format!("{kind:?}")
}
