//! The part of the Kubernetes API that a Lease needs: get, create, replace, watch; and changes of a pod.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use mooncake_base::{Error, ErrorCode, Moment, Result};
use mooncake_kv_client::http::{Answer, HttpClient, JSON, Request};
use serde_json::{Value, json};

use crate::TEXTS;

/// Maximum length of an object.
const BYTES_MAX: u64 = 256 << 10;

/// Time limit for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum length of a name in Kubernetes.
const NAME_BYTES_MAX: usize = 253;

/// The API server as a pod reaches it, and the files of its service account.
const API_SERVER: &str = "https://kubernetes.default.svc";
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The body is laid over the object: `null` removes a field.
const MERGE_PATCH: (&str, &str) = ("content-type", "application/merge-patch+json");

/// The API server, and a namespace in it.
#[derive(Debug)]
pub struct ApiServer {
    /// URL of the Leases of the namespace.
    url: String,
    /// URL of the pods of the namespace.
    pods_url: String,
    namespace: String,
    /// The file of the token of the service account. Kubernetes replaces it now and then.
    token_file: Option<PathBuf>,
    http_client: HttpClient,
}

/// The outcome of a write that the API server compares.
pub(super) enum Written {
    Done(Value),
    /// Another client changed or created the object meanwhile.
    Conflict,
}

impl ApiServer {
    /// Creates the client of an API server at an `https` URL, which proves itself by certificates that
    /// are signed by those in a PEM file, or at an `http` URL, as `kubectl proxy` has one.
    ///
    /// # Errors
    /// The namespace is no name, or the file holds no certificate.
    pub fn new(
        url: &str,
        namespace: &str,
        root_certificates: Option<&[u8]>,
        token_file: Option<PathBuf>,
    ) -> Result<Self> {
        check_name(namespace)?;
        let http_client = match root_certificates {
            None => HttpClient::new(CONNECT_TIMEOUT, BYTES_MAX, &TEXTS),
            Some(pem) => {
                HttpClient::with_root_certificates(CONNECT_TIMEOUT, BYTES_MAX, &TEXTS, pem)?
            }
        };
        let server = url.trim_end_matches('/');
        Ok(Self {
            url: format!("{server}/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"),
            pods_url: format!("{server}/api/v1/namespaces/{namespace}/pods"),
            namespace: namespace.to_owned(),
            token_file,
            http_client,
        })
    }

    /// Creates the client for a program in a pod, with the service account of the pod. `None`: the
    /// namespace of the pod.
    ///
    /// # Errors
    /// The program does not run in a pod, or the namespace is no name.
    pub fn in_pod(namespace: Option<&str>) -> Result<Self> {
        let folder = Path::new(SERVICE_ACCOUNT);
        let read = |name: &str| {
            fs::read(folder.join(name)).map_err(|source| {
                let text =
                    "the service account of the pod cannot be read; k8s:// works inside pods";
                Error::new(ErrorCode::K8S_LEASE_OPERATION_ERROR, text)
                    .with("folder", SERVICE_ACCOUNT)
                    .caused_by(source)
            })
        };
        let certificates = read("ca.crt")?;
        let namespace = match namespace {
            Some(namespace) => namespace.to_owned(),
            None => String::from_utf8_lossy(&read("namespace")?).trim().to_owned(),
        };
        Self::new(API_SERVER, &namespace, Some(&certificates), Some(folder.join("token")))
    }

    pub(super) fn namespace(&self) -> &str {
        &self.namespace
    }

    pub(super) fn close(&self) {
        self.http_client.close();
    }

    pub(super) fn get(&self, name: &str, deadline: Moment) -> Result<Option<Value>> {
        let url = format!("{}/{name}", self.url);
        let answer = self.call(Request::Get, &url, deadline)?;
        match answer.status {
            404 => Ok(None),
            _ => self.object(&answer, &url).map(Some),
        }
    }

    pub(super) fn create(
        &self,
        name: &str,
        mut object: Value,
        deadline: Moment,
    ) -> Result<Written> {
        object["apiVersion"] = json!("coordination.k8s.io/v1");
        object["kind"] = json!("Lease");
        object["metadata"]["name"] = json!(name);
        object["metadata"]["namespace"] = json!(self.namespace);
        let body = object.to_string().into_bytes();
        self.write(Request::Post(&body), &self.url, deadline)
    }

    pub(super) fn replace(&self, name: &str, object: &Value, deadline: Moment) -> Result<Written> {
        let body = object.to_string().into_bytes();
        self.write(Request::Put(&body), &format!("{}/{name}", self.url), deadline)
    }

    /// Lays a document over that of a pod.
    pub(super) fn patch_pod(&self, name: &str, patch: &Value, deadline: Moment) -> Result<()> {
        let body = patch.to_string().into_bytes();
        let url = format!("{}/{name}", self.pods_url);
        let answer = self.call(Request::Patch(&body), &url, deadline)?;
        self.object(&answer, &url).map(drop)
    }

    /// Returns when the object has another version than `known`. `RPC_TIMEOUT` at the deadline.
    pub(super) fn wait_for_change(&self, name: &str, known: &str, deadline: Moment) -> Result<()> {
        if self.wait_for_event(name, known, known, deadline)?.is_none() {
            return Ok(());
        }
        // The version is too old: other objects have changed since. Without one, the events begin
        // with the object as it is.
        match self.wait_for_event(name, "", known, deadline)? {
            None => Ok(()),
            Some(refusal) => Err(Error::new(
                ErrorCode::K8S_LEASE_OPERATION_ERROR,
                "the Kubernetes API refuses to watch the Lease",
            )
            .with("lease", name)
            .with("answer", refusal)),
        }
    }

    /// Watches from a version on, until the object has another one than `known`. Returns the error if
    /// the server does not begin there.
    fn wait_for_event(
        &self,
        name: &str,
        from: &str,
        known: &str,
        deadline: Moment,
    ) -> Result<Option<Value>> {
        let token = self.token()?;
        let url = format!(
            "{}?watch=1&fieldSelector=metadata.name%3D{name}&resourceVersion={from}",
            self.url
        );
        let headers = token.as_deref().map(|token| ("authorization", token));
        let stream = self.http_client.stream(Request::Get, &url, headers.as_slice(), deadline);
        let mut lines = match stream {
            // It says so by an event, or before there are any.
            Err(error) if error.context().any(|named| named == ("status", "410")) => {
                return Ok(Some(error.to_string().into()));
            }
            lines => lines?,
        };
        while let Some(line) = lines.next_line()? {
            let mut event: Value = serde_json::from_slice(&line).map_err(|source| {
                let text = "the server that is watched is not the Kubernetes API";
                Error::new(ErrorCode::K8S_LEASE_OPERATION_ERROR, text)
                    .with("url", &url)
                    .caused_by(source)
            })?;
            if event["type"] == "ERROR" {
                return Ok(Some(event["object"].take()));
            }
            if event["object"]["metadata"]["resourceVersion"] != known {
                return Ok(None);
            }
        }
        Err(Error::new(ErrorCode::RPC_FAIL, TEXTS.broken).with("url", &url))
    }

    fn write(&self, request: Request<'_>, url: &str, deadline: Moment) -> Result<Written> {
        let answer = self.call(request, url, deadline)?;
        match answer.status {
            // The object may be gone when it is to be replaced.
            409 | 404 => Ok(Written::Conflict),
            _ => self.object(&answer, url).map(Written::Done),
        }
    }

    fn call(&self, request: Request<'_>, url: &str, deadline: Moment) -> Result<Answer> {
        let token = self.token()?;
        let is_patch = matches!(request, Request::Patch(_));
        let mut headers = vec![if is_patch { MERGE_PATCH } else { JSON }];
        headers.extend(token.as_deref().map(|token| ("authorization", token)));
        self.http_client.call(request, url, &headers, deadline)
    }

    fn token(&self) -> Result<Option<String>> {
        let Some(file) = &self.token_file else { return Ok(None) };
        let token = fs::read_to_string(file).map_err(|source| {
            Error::new(
                ErrorCode::K8S_LEASE_OPERATION_ERROR,
                "the token of the service account cannot be read",
            )
            .with("file", file.display())
            .caused_by(source)
        })?;
        Ok(Some(format!("Bearer {}", token.trim())))
    }

    fn object(&self, answer: &Answer, url: &str) -> Result<Value> {
        let refused = |text: &str| {
            Error::new(ErrorCode::K8S_LEASE_OPERATION_ERROR, text)
                .with("url", url)
                .with("status", answer.status)
                .with("answer", answer.quoted())
        };
        if !answer.is_success() {
            return Err(refused("the Kubernetes API refused the request"));
        }
        match serde_json::from_slice(&answer.body) {
            Ok(object @ Value::Object(_)) => Ok(object),
            _ => Err(refused("the server is not the Kubernetes API")),
        }
    }
}

/// Checks the name of an object or a namespace.
///
/// # Errors
/// The name is empty, too long, or has characters that Kubernetes does not allow.
pub(super) fn check_name(name: &str) -> Result<()> {
    let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
    if (1..=NAME_BYTES_MAX).contains(&name.len()) && name.chars().all(is_allowed) {
        return Ok(());
    }
    let text = "a name in Kubernetes has lower-case letters, digits, '-' and '.'";
    Err(Error::invalid(text).with("name", format_args!("{name:?}")))
}
