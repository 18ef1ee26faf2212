//! A fake Kubernetes API: Leases in memory, versions that are compared, watches, labels of pods; over
//! TLS on request.

use std::{
    collections::BTreeMap,
    io::{self, BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU16, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use mooncake_base::sync::{Condvar, Mutex};
use rustls::{
    ServerConfig, ServerConnection, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use serde_json::{Value, json};

/// The certificate of the server for `127.0.0.1`, signed by itself, and its key.
pub(crate) const CERTIFICATE: &[u8] = include_bytes!("certificate.pem");
const KEY: &[u8] = include_bytes!("key.pem");

/// The address of the server.
pub(crate) struct KubernetesApi {
    port: u16,
    scheme: &'static str,
    objects: Arc<Objects>,
}

#[derive(Default)]
struct Objects {
    by_name: Mutex<(u64, BTreeMap<String, Value>)>,
    /// The oldest version from which a watch may go on.
    oldest: AtomicU64,
    /// The status of the answer to a watch that begins before; 200: an event says it.
    refusal: AtomicU16,
    requests: AtomicUsize,
    pods: Mutex<Pods>,
    changed: Condvar,
}

/// The labels of the pods, and the status with which changes of them are refused.
#[derive(Default)]
struct Pods {
    labels: BTreeMap<String, BTreeMap<String, String>>,
    refusal: Option<u16>,
    refused: usize,
}

/// A request: method, path, values of two headers, body.
struct Request {
    method: String,
    path: String,
    content_type: String,
    authorization: String,
    body: Vec<u8>,
}

trait Stream: Read + Write {}
impl<S: Read + Write> Stream for S {}

impl KubernetesApi {
    pub(crate) fn start() -> Self {
        Self::serve("http", "", None)
    }

    pub(crate) fn start_with_tls(token: &str) -> Self {
        let certificate = CertificateDer::from_pem_slice(CERTIFICATE).unwrap();
        let key = PrivateKeyDer::from_pem_slice(KEY).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .unwrap();
        Self::serve("https", &format!("Bearer {token}"), Some(Arc::new(config)))
    }

    pub(crate) fn url(&self) -> String {
        format!("{}://127.0.0.1:{}", self.scheme, self.port)
    }

    /// Forgets all changes up to now, as the server does after some minutes. A watch that begins before
    /// is refused with a status; 200: by an event.
    pub(crate) fn forget_changes(&self, status: u16) {
        self.objects.refusal.store(status, Ordering::SeqCst);
        let counter = self.objects.by_name.lock().0;
        self.objects.oldest.store(counter + 1, Ordering::SeqCst);
    }

    /// Number of requests until now.
    pub(crate) fn requests(&self) -> usize {
        self.objects.requests.load(Ordering::SeqCst)
    }

    /// Creates a pod with a label.
    pub(crate) fn add_pod(&self, name: &str, label: (&str, &str)) {
        let labels = BTreeMap::from([(label.0.to_owned(), label.1.to_owned())]);
        self.objects.pods.lock().labels.insert(name.to_owned(), labels);
    }

    /// Refuses changes of pods with a status, or no longer. Returns how many were refused before.
    pub(crate) fn refuse_pods(&self, status: Option<u16>) -> usize {
        let mut pods = self.objects.pods.lock();
        pods.refusal = status;
        std::mem::take(&mut pods.refused)
    }

    /// Waits until the labels of a pod, or the number of refused changes, are as wanted.
    pub(crate) fn wait_for_pod(
        &self,
        name: &str,
        is_wanted: impl Fn(&BTreeMap<String, String>, usize) -> bool,
    ) {
        let mut pods = self.objects.pods.lock();
        while !is_wanted(&pods.labels[name], pods.refused) {
            let waited = self.objects.changed.wait_for(&mut pods, Duration::from_secs(20));
            assert!(!waited.timed_out(), "the labels are {:?}", pods.labels[name]);
        }
    }

    fn serve(scheme: &'static str, authorization: &str, tls: Option<Arc<ServerConfig>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let objects = Arc::<Objects>::default();
        let kept = Arc::clone(&objects);
        let authorization = authorization.to_owned();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (objects, tls) = (Arc::clone(&objects), tls.clone());
                let (stream, authorization) = (stream.unwrap(), authorization.clone());
                // A client that goes away ends its thread.
                thread::spawn(move || answer(open(stream, tls), &authorization, &objects));
            }
        });
        Self { port, scheme, objects: kept }
    }
}

fn open(stream: TcpStream, tls: Option<Arc<ServerConfig>>) -> Box<dyn Stream> {
    match tls {
        None => Box::new(stream),
        Some(config) => Box::new(StreamOwned::new(ServerConnection::new(config).unwrap(), stream)),
    }
}

/// Answers one request and closes the connection.
fn answer(stream: Box<dyn Stream>, authorization: &str, objects: &Objects) -> io::Result<()> {
    let mut reader = BufReader::new(stream);
    let request = read(&mut reader)?;
    let mut stream = reader.into_inner();
    objects.requests.fetch_add(1, Ordering::SeqCst);
    if request.authorization != authorization {
        return respond(&mut *stream, 401, &json!({ "reason": "Unauthorized" }));
    }
    let (path, query) = request.path.split_once('?').unwrap_or((&request.path, ""));
    if let Some(pod) = path.strip_prefix("/api/v1/namespaces/default/pods/") {
        assert_eq!(request.content_type, "application/merge-patch+json");
        let (status, body) = objects.patch_pod(pod, &request.body);
        return respond(&mut *stream, status, &body);
    }
    let rest = path.strip_prefix("/apis/coordination.k8s.io/v1/namespaces/default/leases").unwrap();
    if query.contains("watch=1") {
        return watch(&mut *stream, query, objects);
    }
    let (status, body) =
        objects.change(&request.method, rest.trim_start_matches('/'), &request.body);
    respond(&mut *stream, status, &body)
}

fn read(reader: &mut BufReader<Box<dyn Stream>>) -> io::Result<Request> {
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let (mut authorization, mut content_type, mut length) = (String::new(), String::new(), 0);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim().split_once(':') else { break };
        match &*name.to_ascii_lowercase() {
            "authorization" => value.trim().clone_into(&mut authorization),
            "content-type" => value.trim().clone_into(&mut content_type),
            "content-length" => length = value.trim().parse().unwrap(),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    Ok(Request { method, path, content_type, authorization, body })
}

fn respond(stream: &mut dyn Stream, status: u16, body: &Value) -> io::Result<()> {
    let body = body.to_string();
    let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n", body.len());
    stream.write_all(format!("{head}Connection: close\r\n\r\n{body}").as_bytes())?;
    stream.flush()
}

/// Sends an event whenever the object of the field selector has another version, and at the beginning
/// if the version is not given.
fn watch(stream: &mut dyn Stream, query: &str, objects: &Objects) -> io::Result<()> {
    let field = |name: &str| {
        query.split('&').find_map(|part| part.strip_prefix(name)).unwrap_or_default().to_owned()
    };
    let (name, after) = (field("fieldSelector=metadata.name%3D"), field("resourceVersion="));
    let mut after: u64 = after.parse().unwrap_or(0);
    let is_forgotten = after > 0 && after < objects.oldest.load(Ordering::SeqCst);
    let expired = json!({ "kind": "Status", "code": 410, "reason": "Expired" });
    match objects.refusal.load(Ordering::SeqCst) {
        status if is_forgotten && status != 200 => return respond(stream, status, &expired),
        _ => stream.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")?,
    }
    stream.flush()?;
    if is_forgotten {
        let event = json!({ "type": "ERROR", "object": expired });
        stream.write_all(format!("{event}\n").as_bytes())?;
        return stream.flush();
    }
    let mut state = objects.by_name.lock();
    loop {
        if let Some(object) = state.1.get(&name)
            && version(object) > after
        {
            after = version(object);
            let event = json!({ "type": "MODIFIED", "object": object }).to_string();
            drop(state);
            stream.write_all(format!("{event}\n").as_bytes())?;
            stream.flush()?;
            state = objects.by_name.lock();
            continue;
        }
        if objects.changed.wait_for(&mut state, Duration::from_secs(30)).timed_out() {
            return Ok(());
        }
    }
}

impl Objects {
    fn patch_pod(&self, name: &str, patch: &[u8]) -> (u16, Value) {
        let patch: Value = serde_json::from_slice(patch).unwrap();
        let mut pods = self.pods.lock();
        self.changed.notify_all();
        if let Some(status) = pods.refusal {
            pods.refused += 1;
            return (status, json!({ "reason": "Forbidden" }));
        }
        let Some(labels) = pods.labels.get_mut(name) else {
            return (404, json!({ "reason": "NotFound" }));
        };
        for (label, value) in patch["metadata"]["labels"].as_object().unwrap() {
            match value.as_str() {
                Some(value) => labels.insert(label.clone(), value.to_owned()),
                None => labels.remove(label),
            };
        }
        (200, json!({ "metadata": { "name": name, "labels": labels } }))
    }

    fn change(&self, method: &str, name: &str, body: &[u8]) -> (u16, Value) {
        let mut state = self.by_name.lock();
        let (counter, by_name) = &mut *state;
        let conflict = (409, json!({ "reason": "Conflict" }));
        if method == "GET" {
            return match by_name.get(name) {
                Some(object) => (200, object.clone()),
                None => (404, json!({ "reason": "NotFound" })),
            };
        }
        let mut object: Value = serde_json::from_slice(body).unwrap();
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        let is_new = match (method, by_name.get(&name)) {
            ("POST", None) => true,
            ("PUT", Some(present)) if version(present) == version(&object) => false,
            ("PUT", None) => return (404, json!({ "reason": "NotFound" })),
            _ => return conflict,
        };
        assert!(object["spec"]["leaseDurationSeconds"].is_u64() || object["spec"].is_null());
        *counter += 1;
        object["metadata"]["resourceVersion"] = json!(counter.to_string());
        by_name.insert(name, object.clone());
        self.changed.notify_all();
        (if is_new { 201 } else { 200 }, object)
    }
}

fn version(object: &Value) -> u64 {
    object["metadata"]["resourceVersion"].as_str().and_then(|text| text.parse().ok()).unwrap_or(0)
}
