//! `PutOptions`: options of puts, validated once at construction.

use std::{collections::BTreeMap, time::Duration};

use mooncake_base::{Error, Result, Version};
use mooncake_store_client as client;
use mooncake_store_client::SoftPin;
use pyo3::{
    exceptions::PyTypeError,
    prelude::*,
    types::{PyDict, PyMapping, PyTuple},
};

use crate::{
    argument::{self, NumberOption},
    error::or_raise,
};

/// The maximum number of copies of an object, which masters make.
const REPLICAS_MAX: u32 = 128;

/// Names of the options.
const OPTIONS: [&str; 11] = [
    "replicas",
    "soft_pin",
    "soft_pin_ttl_ms",
    "is_hard_pinned",
    "preferred_segments",
    "prefers_own_segments",
    "data_type",
    "groups",
    "ttl_ms",
    "tags",
    "if_versions",
];

/// Options of puts. Immutable; may be used for any number of puts.
///
/// Args:
///     replicas: Number of copies, each on another segment; fewer if there are not enough segments.
///     soft_pin: "enable" protects the objects from eviction for a while, "disable" ends that,
///         "preserve" leaves it unchanged.
///     soft_pin_ttl_ms: Duration of a soft pin; None uses the master's default.
///     is_hard_pinned: True if the objects must never be evicted.
///     preferred_segments: Names of segments to use first.
///     prefers_own_segments: True to use the segments of this process first.
///     data_type: Kind of data, as a number that only callers interpret.
///     groups: Group of each item of the batch, kept or evicted as a whole; "" for none.
///     ttl_ms: Time after which the objects are removed; None: never.
///     tags: Text stored beside each object: at most 32 names and values, 1 KiB in all.
///     if_versions: Version that each item of the batch replaces; 0 for any. Existing objects of
///         other versions are kept.
#[pyclass(frozen, eq, module = "mooncake", name = "PutOptions", get_all)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PutOptions {
    replicas: u32,
    soft_pin: String,
    soft_pin_ttl_ms: Option<u64>,
    is_hard_pinned: bool,
    preferred_segments: Vec<String>,
    prefers_own_segments: bool,
    data_type: u32,
    groups: Option<Vec<String>>,
    ttl_ms: Option<u64>,
    tags: BTreeMap<String, String>,
    if_versions: Option<Vec<u64>>,
}

#[pymethods]
impl PutOptions {
    #[new]
    #[pyo3(
        signature = (**options),
        text_signature = "(*, replicas=1, soft_pin='preserve', soft_pin_ttl_ms=None, \
            is_hard_pinned=False, preferred_segments=(), prefers_own_segments=False, data_type=0, \
            groups=None, ttl_ms=None, tags={}, if_versions=None)"
    )]
    fn new(py: Python<'_>, options: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let given = Given { py, options };
        if let Some(name) = given.unknown() {
            return Err(unknown_option(&name)?);
        }
        let names = "a list of names";
        let versions = |versions: Vec<NumberOption<u64>>| {
            versions.into_iter().map(|version| version.named("if_versions")).collect()
        };
        let if_versions: Option<Vec<_>> = given.optional("if_versions", "a list of integers")?;
        let options = Self {
            replicas: given.number("replicas")?.unwrap_or(1),
            soft_pin: given.get("soft_pin", "text")?.unwrap_or_else(|| "preserve".to_owned()),
            soft_pin_ttl_ms: given.optional_number("soft_pin_ttl_ms")?,
            is_hard_pinned: given.get("is_hard_pinned", "a bool")?.unwrap_or_default(),
            preferred_segments: given.get("preferred_segments", names)?.unwrap_or_default(),
            prefers_own_segments: given.get("prefers_own_segments", "a bool")?.unwrap_or_default(),
            data_type: given.number("data_type")?.unwrap_or_default(),
            groups: given.optional("groups", names)?,
            ttl_ms: given.optional_number("ttl_ms")?,
            tags: given.value("tags")?.map_or(Ok(BTreeMap::new()), |tags| tags_of(&tags))?,
            if_versions: or_raise(py, if_versions.map(versions).transpose())?,
        };
        or_raise(py, options.check())?;
        Ok(options)
    }

    /// Returns the arguments of the constructor, with which copies and pickles are made.
    fn __getnewargs_ex__<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
        let options = PyDict::new(py);
        options.set_item("replicas", self.replicas)?;
        options.set_item("soft_pin", &self.soft_pin)?;
        options.set_item("soft_pin_ttl_ms", self.soft_pin_ttl_ms)?;
        options.set_item("is_hard_pinned", self.is_hard_pinned)?;
        options.set_item("preferred_segments", &self.preferred_segments)?;
        options.set_item("prefers_own_segments", self.prefers_own_segments)?;
        options.set_item("data_type", self.data_type)?;
        options.set_item("groups", &self.groups)?;
        options.set_item("ttl_ms", self.ttl_ms)?;
        options.set_item("tags", &self.tags)?;
        options.set_item("if_versions", &self.if_versions)?;
        Ok((PyTuple::empty(py), options))
    }

    fn __repr__(&self) -> String {
        let mut text =
            format!("PutOptions(replicas={}, soft_pin={:?}", self.replicas, self.soft_pin);
        if let Some(ttl) = self.soft_pin_ttl_ms {
            text += &format!(", soft_pin_ttl_ms={ttl}");
        }
        if self.is_hard_pinned {
            text += ", is_hard_pinned=True";
        }
        if !self.preferred_segments.is_empty() {
            text += &format!(", preferred_segments={:?}", self.preferred_segments);
        }
        if self.prefers_own_segments {
            text += ", prefers_own_segments=True";
        }
        if self.data_type != 0 {
            text += &format!(", data_type={}", self.data_type);
        }
        if let Some(groups) = &self.groups {
            text += &format!(", groups={groups:?}");
        }
        if let Some(ttl) = self.ttl_ms {
            text += &format!(", ttl_ms={ttl}");
        }
        if !self.tags.is_empty() {
            text += &format!(", tags={:?}", self.tags);
        }
        if let Some(versions) = &self.if_versions {
            text += &format!(", if_versions={versions:?}");
        }
        text + ")"
    }
}

/// The options that a constructor was given, whose errors name the option.
struct Given<'a, 'py> {
    py: Python<'py>,
    options: Option<&'a Bound<'py, PyDict>>,
}

impl<'py> Given<'_, 'py> {
    /// Returns the first name that is none of an option.
    fn unknown(&self) -> Option<Bound<'py, PyAny>> {
        let is_known = |name: &Bound<'_, PyAny>| {
            name.extract::<String>().is_ok_and(|name| OPTIONS.contains(&&*name))
        };
        self.options?.iter().map(|(name, _)| name).find(|name| !is_known(name))
    }

    /// Returns the value of an option, if it is given.
    fn value(&self, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.options.map_or(Ok(None), |options| options.get_item(name))
    }

    /// Returns the value of an option as what it is to be.
    fn get<T: FromPyObjectOwned<'py>>(&self, name: &str, what: &str) -> PyResult<Option<T>> {
        let Some(value) = self.value(name)? else { return Ok(None) };
        value.extract().map(Some).map_err(|_| match value.repr() {
            Ok(shown) => {
                let shown = shown.to_string();
                PyTypeError::new_err(format!("{name} is {what}, not {shown:.60}"))
            }
            Err(error) => error,
        })
    }

    /// Returns the value of an option that may be None.
    fn optional<T: FromPyObjectOwned<'py>>(&self, name: &str, what: &str) -> PyResult<Option<T>> {
        match self.value(name)? {
            Some(value) if value.is_none() => Ok(None),
            _ => self.get(name, what),
        }
    }

    fn number<T: TryFrom<u64>>(&self, name: &'static str) -> PyResult<Option<T>> {
        let number: Option<NumberOption<T>> = self.get(name, "an integer")?;
        or_raise(self.py, number.map(|number| number.named(name)).transpose())
    }

    fn optional_number<T: TryFrom<u64>>(&self, name: &'static str) -> PyResult<Option<T>> {
        let number: Option<NumberOption<T>> = self.optional(name, "an integer")?;
        or_raise(self.py, number.map(|number| number.named(name)).transpose())
    }
}

/// Returns the error for an unknown option, with the option that has a similar name.
fn unknown_option(name: &Bound<'_, PyAny>) -> PyResult<PyErr> {
    let suggestion = name
        .py()
        .import("mooncake._api.keywords")?
        .call_method1("suggestion", (name, OPTIONS))?
        .extract::<String>()?;
    let text = format!("PutOptions() got an unexpected keyword argument '{name}'{suggestion}");
    Ok(PyTypeError::new_err(text))
}

/// Reads tags; the error for another value than text names the tag.
fn tags_of(tags: &Bound<'_, PyAny>) -> PyResult<BTreeMap<String, String>> {
    let Ok(tags) = tags.cast::<PyMapping>() else {
        let kind = tags.get_type().name()?;
        return Err(PyTypeError::new_err(format!("tags are names and values, not {kind}")));
    };
    let mut read = BTreeMap::new();
    for item in tags.items()? {
        let (name, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract()?;
        let (Ok(text), Ok(tag)) = (value.extract(), name.extract()) else {
            let (kind, shown) = (value.get_type().name()?, name.repr()?);
            return Err(PyTypeError::new_err(format!(
                "names and values of tags are text: tags[{shown}] is of type {kind}; use str()"
            )));
        };
        read.insert(tag, text);
    }
    Ok(read)
}

impl PutOptions {
    /// Returns the client's options for a batch of `items` objects.
    pub(crate) fn for_batch(&self, is_upsert: bool, items: usize) -> Result<client::PutOptions> {
        if let Some(groups) = &self.groups {
            argument::check_same_length("groups", groups.len(), items)?;
        }
        if let Some(versions) = &self.if_versions {
            argument::check_same_length("if_versions", versions.len(), items)?;
        }
        Ok(client::PutOptions {
            replicas: self.replicas,
            // A put that names the version that it replaces does not keep it.
            is_upsert: is_upsert || self.if_versions.is_some(),
            soft_pin: self.pin()?,
            soft_pin_ttl: self.soft_pin_ttl_ms.map(Duration::from_millis),
            is_hard_pinned: self.is_hard_pinned,
            preferred_segments: self.preferred_segments.clone(),
            prefers_own_segments: self.prefers_own_segments,
            data_type: self.data_type,
            groups: self.groups.clone().unwrap_or_default(),
            ttl: self.ttl_ms.map(Duration::from_millis),
            tags: self.tags.clone(),
            if_versions: self.if_versions.iter().flatten().copied().map(Version).collect(),
            if_absent: Vec::new(),
            absent_suffixes: client::Suffixes::default(),
        })
    }

    fn check(&self) -> Result<()> {
        if self.replicas == 0 {
            return Err(Error::invalid("an object has at least one replica").with("replicas", 0));
        }
        if self.replicas > REPLICAS_MAX {
            return Err(Error::invalid("an object has no more replicas than the limit")
                .with("replicas", self.replicas)
                .with("limit", REPLICAS_MAX));
        }
        if self.ttl_ms == Some(0) {
            return Err(Error::invalid("the time to live is longer than zero").with("ttl_ms", 0));
        }
        if self.pin()? != SoftPin::Enable && self.soft_pin_ttl_ms.is_some() {
            return Err(Error::invalid("only a soft pin that is enabled has a time to live")
                .with("soft_pin", &self.soft_pin));
        }
        Ok(())
    }

    fn pin(&self) -> Result<SoftPin> {
        match self.soft_pin.as_str() {
            "preserve" => Ok(SoftPin::Preserve),
            "enable" => Ok(SoftPin::Enable),
            "disable" => Ok(SoftPin::Disable),
            other => Err(Error::invalid("a soft pin is 'preserve', 'enable' or 'disable'")
                .with("soft_pin", other)),
        }
    }
}
