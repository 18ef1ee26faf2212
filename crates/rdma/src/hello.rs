//! Messages by which two engines connect queue pairs, in upstream's JSON.

use mooncake_base::{Error, ErrorCode, Result};
use mooncake_verbs::Gid;
use serde::{Deserialize, Serialize};

/// A request to connect, its answer, or the confirmation that both sides are ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(default)]
pub(crate) struct Hello {
    /// Address of the sender's port; see [`format_gid`].
    pub(crate) local_gid: String,
    /// The sender's identifier in an InfiniBand subnet.
    pub(crate) local_lid: u16,
    /// The sender's device, as `SERVER@DEVICE`.
    pub(crate) local_nic_path: String,
    /// Unused.
    pub(crate) payload: String,
    /// The receiver's device, in the same form.
    pub(crate) peer_nic_path: String,
    /// The sender's queue pairs. The first of one side is connected with the first of the other.
    pub(crate) qp_num: Vec<u32>,
    /// True in the confirmation. Present in a request of a sender that will confirm.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ready_ack: Option<bool>,
    /// Why the request was refused; empty if it was not.
    pub(crate) reply_msg: String,
    /// Present if the sender runs this implementation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mooncake: Option<Attempt>,
}

/// Tells requests of one engine apart, so that a late one does not undo a later one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Attempt {
    /// Id of the engine.
    pub(crate) engine: String,
    /// Grows with each request of the engine.
    pub(crate) number: u64,
    /// Names the queue pairs of the message among all that the engine has had: a device may use the numbers
    /// of queue pairs again at once. 0 in messages of older engines.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) set: u64,
    /// Reads that the queue pairs serve at a time; 0: not told.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) reads: u8,
}

fn is_zero<T: Default + PartialEq>(number: &T) -> bool {
    *number == T::default()
}

impl Attempt {
    /// Returns whether two messages are about the same queue pairs of one engine, as far as they tell.
    pub(crate) fn is_same_set(&self, other: &Self) -> bool {
        let is_told = self.set != 0 && other.set != 0;
        self.engine == other.engine && (!is_told || self.set == other.set)
    }
}

impl Hello {
    /// Creates the answer that refuses a request.
    pub(crate) fn refusal(reason: impl Into<String>) -> Self {
        Self { reply_msg: reason.into(), ..Self::default() }
    }

    pub(crate) fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a struct of strings and numbers is always JSON")
    }

    /// Parses a message; unknown fields are ignored.
    ///
    /// # Errors
    /// The text is not JSON, or a field has the wrong type.
    pub(crate) fn from_json(text: &[u8]) -> Result<Self> {
        serde_json::from_slice(text).map_err(|source| {
            Error::new(ErrorCode::TRANSFER_FAIL, "the message to connect cannot be read")
                .caused_by(source)
        })
    }

    /// Returns whether the sender will confirm, or this is its confirmation.
    pub(crate) fn confirms(&self) -> bool {
        self.ready_ack.is_some()
    }
}

/// Writes an address as upstream does: sixteen bytes in hexadecimal, separated by colons.
pub(crate) fn format_gid(gid: Gid) -> String {
    gid.0.map(|byte| format!("{byte:02x}")).join(":")
}

/// Parses an address in the form of [`format_gid`].
pub(crate) fn parse_gid(text: &str) -> Option<Gid> {
    let mut bytes = [0; 16];
    let mut parts = text.split(':');
    for byte in &mut bytes {
        let part = parts.next().filter(|part| part.len() == 2)?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    parts.next().is_none().then_some(Gid(bytes))
}

/// Joins the name of a server with that of a device.
pub(crate) fn nic_path(server: &str, device: &str) -> String {
    format!("{server}@{device}")
}

/// Splits a path at the first `@`.
pub(crate) fn split_nic_path(path: &str) -> Option<(&str, &str)> {
    path.split_once('@')
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPTURED: &str = r#"{"local_gid":"00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:02","local_lid":0,"local_nic_path":"10.77.0.2:15418@rxe1","payload":"","peer_nic_path":"10.77.0.1:15672@rxe0","qp_num":[17,18],"ready_ack":false,"reply_msg":""}"#;

    #[test]
    fn reads_and_writes_upstream_messages() {
        let hello = Hello::from_json(CAPTURED.as_bytes()).unwrap();
        assert_eq!((hello.qp_num.as_slice(), hello.ready_ack), (&[17, 18][..], Some(false)));
        assert!(hello.confirms() && hello.mooncake.is_none());
        let gid = parse_gid(&hello.local_gid).unwrap();
        assert_eq!(gid.to_string(), "::ffff:10.77.0.2");
        assert_eq!(format_gid(gid), hello.local_gid);
        assert_eq!(String::from_utf8(hello.to_json()).unwrap(), CAPTURED);
        let old = Hello::from_json(br#"{"qp_num":[1]}"#).unwrap();
        assert!(!old.confirms());
        assert!(Hello::from_json(b"{\"qp_num\":[-1]}").is_err());
        assert!(Hello::from_json(b"7").is_err());
    }

    #[test]
    fn older_engines_name_no_queue_pairs() {
        let old = br#"{"mooncake":{"engine":"e","number":3}}"#;
        let old = Hello::from_json(old).unwrap().mooncake.unwrap();
        assert_eq!((old.set, old.reads), (0, 0));
        let (one, two) = (Attempt { set: 1, ..old.clone() }, Attempt { set: 2, ..old.clone() });
        assert!(old.is_same_set(&one) && one.is_same_set(&old) && one.is_same_set(&one));
        assert!(!one.is_same_set(&two));
        assert!(!one.is_same_set(&Attempt { engine: "f".to_owned(), ..one.clone() }));
    }

    #[test]
    fn rejects_other_forms_of_addresses() {
        for text in ["", "::1", "00:00", "0:0:0:0:0:0:0:0:0:0:ff:ff:a:4d:0:2"] {
            assert_eq!(parse_gid(text), None, "{text}");
        }
        let seventeen = format!("{}:00", format_gid(Gid([1; 16])));
        assert_eq!(parse_gid(&seventeen), None);
    }

    #[test]
    fn path_is_split_at_the_first_separator() {
        assert_eq!(split_nic_path("10.0.0.1:15000@mlx5_0"), Some(("10.0.0.1:15000", "mlx5_0")));
        assert_eq!(split_nic_path("a@b@c"), Some(("a", "b@c")));
        assert_eq!(split_nic_path("none"), None);
        assert_eq!(nic_path("a", "b"), "a@b");
    }
}
