//! etcd, over the JSON gateway of servers of version 3.4 and later.

use std::sync::atomic::{AtomicUsize, Ordering};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock};
use serde_json::Value;

use crate::http::{Answer, HttpClient, JSON, Lines, Request};

/// Default port of a member.
pub const PORT: u16 = 2379;

/// Maximum number of members in an address.
pub const MEMBERS_MAX: usize = 16;

/// The members of a cluster. Each member can answer every request.
#[derive(Debug)]
pub struct EtcdGateway {
    /// Base URLs of the members.
    members: Vec<String>,
    /// Index of the member that answered last.
    preferred: AtomicUsize,
    http_client: HttpClient,
}

impl EtcdGateway {
    /// Creates a gateway to the members.
    ///
    /// # Errors
    /// There are none, or too many.
    pub fn new(members: &[Endpoint], http_client: HttpClient) -> Result<Self> {
        if !(1..=MEMBERS_MAX).contains(&members.len()) {
            return Err(Error::invalid("1 to 16 members of an etcd cluster can be named"));
        }
        let members =
            members.iter().map(|member| format!("http://{}", member.clone().or_port(PORT)));
        Ok(Self { members: members.collect(), preferred: AtomicUsize::new(0), http_client })
    }

    /// Posts a question to a path such as `kv/range`, to the members in turn, beginning with the one
    /// that answered last. A member that was asked in vain may have carried out the question.
    ///
    /// # Errors
    /// No member answered before the deadline, or the answer is a refusal.
    pub fn call(&self, path: &str, question: &Value, deadline: Moment) -> Result<Value> {
        let body = question.to_string().into_bytes();
        self.each_member(path, deadline, |url, share| {
            let answer = self.http_client.call(Request::Post(&body), url, &[JSON], share)?;
            Ok(read(&answer, url))
        })?
    }

    /// Posts a question whose answers come as lines, until the deadline.
    ///
    /// # Errors
    /// No member answers.
    pub fn stream(&self, path: &str, question: &Value, deadline: Moment) -> Result<Lines> {
        let body = question.to_string().into_bytes();
        self.each_member(path, deadline, |url, _| {
            self.http_client.stream(Request::Post(&body), url, &[JSON], deadline)
        })
    }

    /// Lets the next call begin with another member.
    pub fn prefer_next_member(&self) {
        let next = (self.preferred.load(Ordering::Relaxed) + 1) % self.members.len();
        self.preferred.store(next, Ordering::Relaxed);
    }

    /// Ends the calls that run, and refuses later ones.
    pub fn close(&self) {
        self.http_client.close();
    }

    fn each_member<T>(
        &self,
        path: &str,
        deadline: Moment,
        ask: impl Fn(&str, Moment) -> Result<T>,
    ) -> Result<T> {
        let first = self.preferred.load(Ordering::Relaxed);
        let count = self.members.len();
        let mut failure = None;
        for turn in 0..count {
            let member = (first + turn) % count;
            let url = format!("{}/v3/{path}", self.members[member]);
            let now = SystemClock.now();
            // A silent member must leave time for the members after it.
            let share = deadline.left(now) / u32::try_from(count - turn).unwrap_or(1);
            match ask(&url, now + share) {
                Ok(answer) => {
                    self.preferred.store(member, Ordering::Relaxed);
                    return Ok(answer);
                }
                Err(error) => failure = Some(error),
            }
        }
        Err(failure.expect("a gateway has at least one member"))
    }
}

/// Encodes a key or a value.
pub fn encode(bytes: impl AsRef<[u8]>) -> String {
    BASE64.encode(bytes)
}

/// Decodes the field `name` of an entry; an empty one is omitted from the JSON.
///
/// # Errors
/// The field is not base64.
pub fn decode(entry: &Value, name: &str) -> Result<Vec<u8>> {
    BASE64.decode(entry[name].as_str().unwrap_or("")).map_err(|source| {
        Error::new(ErrorCode::ETCD_OPERATION_ERROR, "an answer of etcd cannot be read")
            .caused_by(source)
    })
}

/// Returns a number, which the JSON of protobuf writes as a string; 0 if it is omitted.
pub fn number(value: &Value) -> i64 {
    match value {
        Value::String(text) => text.parse().unwrap_or(0),
        value => value.as_i64().unwrap_or(0),
    }
}

/// Parses the JSON of an answer.
///
/// # Errors
/// etcd refused the request, or the server is not etcd.
pub fn read(answer: &Answer, url: &str) -> Result<Value> {
    let refused = |text: &str| {
        Error::new(ErrorCode::ETCD_OPERATION_ERROR, text)
            .with("url", url)
            .with("status", answer.status)
            .with("answer", answer.quoted())
    };
    if !answer.is_success() {
        return Err(refused("etcd refused the request"));
    }
    match serde_json::from_slice(&answer.body) {
        Ok(value @ Value::Object(_)) => Ok(value),
        _ => Err(refused("the server is not etcd 3.4 or later")),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use mooncake_base::fuzz::{self, Target, outcome};
    use serde_json::json;

    use super::*;

    #[test]
    fn fuzzed_answers_decode_to_what_is_encoded() {
        let entry = json!([{ "key": "a2V5", "value": encode(b"value"), "lease": "7" }]);
        let seeds = [
            json!({ "kvs": entry, "count": "1" }),
            json!({ "kvs": [{ "key": "a2V5" }], "header": { "revision": "9" } }),
            json!({ "succeeded": true, "responses": [{ "response_put": {} }] }),
            json!({}),
        ];
        let seeds = seeds.iter().map(|seed| seed.to_string().into_bytes()).collect();
        fuzz::check(&[Target { name: "etcd answer", seeds, run: answer }]);
    }

    fn answer(bytes: &[u8]) -> u64 {
        let Ok(answer) = read(&Answer { status: 200, body: bytes.to_vec() }, "url") else {
            return 0;
        };
        let value = decode(&answer["kvs"][0], "value").inspect(|value| {
            let again = json!({ "value": encode(value) });
            assert_eq!(decode(&again, "value").expect("we wrote it"), *value);
        });
        let value = value.map(|value| value.is_empty()).map_err(|error| error.code());
        outcome((value, number(&answer["header"]["revision"]), answer["succeeded"].as_bool()))
    }

    #[test]
    fn silent_member_leaves_time_for_the_next_one() {
        // A listener that accepts connections and answers nothing, and a port without a listener.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = |port| Endpoint::new("127.0.0.1", port);
        let dead = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let members = [at(silent.local_addr().unwrap().port()), at(dead)];
        let client =
            HttpClient::new(std::time::Duration::from_secs(1), 1 << 16, &crate::texts::TEST_TEXTS);
        let gateway = EtcdGateway::new(&members, client).unwrap();
        let begin = SystemClock.now();
        let deadline = begin + std::time::Duration::from_millis(400);
        let error = gateway.call("kv/range", &json!({}), deadline).unwrap_err();
        // The error is that of the second member, which was asked in time.
        assert!(error.to_string().contains(&dead.to_string()), "{error}");
        assert!(SystemClock.now().since(begin) < std::time::Duration::from_secs(20));
    }

    #[test]
    fn gateway_needs_members() {
        let client =
            || HttpClient::new(std::time::Duration::from_secs(1), 16, &crate::texts::TEST_TEXTS);
        assert!(EtcdGateway::new(&[], client()).is_err());
        let many = vec![Endpoint::new("h", 1); MEMBERS_MAX + 1];
        assert!(EtcdGateway::new(&many, client()).is_err());
        assert!(EtcdGateway::new(&many[1..], client()).is_ok());
    }
}
