//! Conversions between wire types and checked types. Outside input is checked here, once.

use bytes::Bytes;
use mooncake_base::{ClientId, Error, ErrorCode, Result, TenantId};

use crate::v1;

impl From<&Error> for v1::Failure {
    fn from(error: &Error) -> Self {
        let detail = |(name, value): (&str, &str)| v1::FailureDetail {
            name: name.to_owned(),
            value: value.to_owned(),
        };
        Self {
            code: error.code().number(),
            message: error.to_string(),
            unfinished_put: None,
            context: error.context().map(detail).collect(),
        }
    }
}

impl From<&v1::Failure> for Error {
    /// Keeps a known code; an unknown number, from a newer master, becomes an internal error.
    fn from(failure: &v1::Failure) -> Self {
        let code = ErrorCode::from_number(failure.code).unwrap_or(ErrorCode::INTERNAL_ERROR);
        let values = failure.context.iter();
        let values = values.map(|detail| (detail.name.clone(), detail.value.clone()));
        Self::restored(code, failure.message.clone(), values)
    }
}

impl From<Result<()>> for v1::ItemResult {
    fn from(result: Result<()>) -> Self {
        Self { failure: result.err().map(|error| (&error).into()) }
    }
}

impl From<&v1::ItemResult> for Result<()> {
    fn from(result: &v1::ItemResult) -> Self {
        match &result.failure {
            Some(failure) => Err(failure.into()),
            None => Ok(()),
        }
    }
}

/// The checked caller of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The client's id.
    pub client: ClientId,
    /// The tenant in whose namespace the client calls.
    pub tenant: TenantId,
}

impl From<&Caller> for v1::Caller {
    fn from(caller: &Caller) -> Self {
        let tenant = match caller.tenant.as_str() {
            TenantId::DEFAULT => String::new(),
            other => other.to_owned(),
        };
        Self { client: Bytes::copy_from_slice(&caller.client.to_bytes()), tenant }
    }
}

impl TryFrom<Option<&v1::Caller>> for Caller {
    type Error = Error;

    fn try_from(caller: Option<&v1::Caller>) -> Result<Self> {
        let caller = caller.ok_or_else(|| Error::invalid("the call does not say who calls"))?;
        let client = ClientId::from_bytes(&caller.client).ok_or_else(|| {
            Error::invalid("a client id has 16 bytes").with("bytes", caller.client.len())
        })?;
        Ok(Self { client, tenant: TenantId::new(&caller.tenant) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_keeps_code_message_and_context_over_the_wire() {
        let error = Error::new(ErrorCode::OBJECT_NOT_FOUND, "object not found").with("key", "k");
        let back = Error::from(&v1::Failure::from(&error));
        assert_eq!((back.code(), back.message()), (error.code(), "object not found key=k"));
        assert_eq!(back.to_string(), "object not found key=k");
        assert_eq!(back.context().collect::<Vec<_>>(), [("key", "k")]);
        let newer = v1::Failure { code: -99999, ..v1::Failure::default() };
        assert_eq!(Error::from(&newer).code(), ErrorCode::INTERNAL_ERROR);
    }

    #[test]
    fn rejects_a_call_without_a_caller() {
        assert!(Caller::try_from(None).is_err());
        let short = v1::Caller { client: Bytes::from_static(b"1"), tenant: String::new() };
        assert!(Caller::try_from(Some(&short)).is_err());
        let caller = Caller { client: ClientId::random(), tenant: TenantId::new("t") };
        assert_eq!(Caller::try_from(Some(&v1::Caller::from(&caller))).unwrap(), caller);
    }
}
