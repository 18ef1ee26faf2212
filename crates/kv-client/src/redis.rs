//! Connections to a Redis server that are logged in to their database.

use std::{fmt, net::TcpStream, sync::Arc, time::Duration};

use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_os::{DeadlineStream, dial};

use crate::{
    ErrorTexts,
    resp::{Reply, RespStream},
};

/// Default port of a server.
pub const PORT: u16 = 6379;

/// Login for a Redis server and the number of the database. Values in the server's address take
/// precedence.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct RedisLogin {
    /// Empty for the server's default user.
    pub username: String,
    /// Empty for no password.
    pub password: String,
    /// Number of the database.
    pub database: u32,
}

impl fmt::Debug for RedisLogin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let password = if self.password.is_empty() { "none" } else { "given" };
        f.debug_struct("RedisLogin")
            .field("username", &self.username)
            .field("password", &password)
            .field("database", &self.database)
            .finish()
    }
}

/// The address of a server, with the login.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RedisAddress {
    /// Host and port.
    pub endpoint: Endpoint,
    /// Login and database.
    pub login: RedisLogin,
}

impl RedisAddress {
    /// Parses `[user[:password]@]host[:port][/database]`; missing parts are taken from the login.
    ///
    /// # Errors
    /// The text is not an address.
    pub fn parse(address: &str, login: &RedisLogin) -> Result<Self> {
        let (user, place) = match address.rsplit_once('@') {
            Some((user, place)) => (Some(user), place),
            None => (None, address),
        };
        // The part before the @ contains a secret and must not appear in errors.
        let bad = |text| Error::invalid(text).with("address", place);
        let mut login = login.clone();
        if let Some(user) = user {
            let (name, password) = user.split_once(':').unwrap_or((user, ""));
            name.clone_into(&mut login.username);
            password.clone_into(&mut login.password);
        }
        let (host, database) = place.split_once('/').unwrap_or((place, ""));
        if !database.is_empty() {
            let number = database.trim_end_matches('/').parse();
            login.database = number.map_err(|_| bad("a Redis database is a number"))?;
        }
        let endpoint: Endpoint =
            host.parse().map_err(|_| bad("not the address of a Redis server"))?;
        Ok(Self { endpoint: endpoint.or_port(PORT), login })
    }
}

/// The address without the login.
impl fmt::Display for RedisAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "redis://{}/{}", self.endpoint, self.login.database)
    }
}

/// A connection that is logged in to its database.
#[derive(Debug)]
pub struct RedisConnection {
    url: String,
    socket: Arc<TcpStream>,
    stream: RespStream<DeadlineStream<Arc<TcpStream>>>,
    texts: &'static ErrorTexts,
}

impl RedisConnection {
    /// Connects and logs in. Exchanges end at the deadline.
    ///
    /// # Errors
    /// The server cannot be reached, or refuses the login.
    pub fn open(
        address: &RedisAddress,
        connect_timeout: Duration,
        bytes_max: usize,
        texts: &'static ErrorTexts,
        deadline: Moment,
    ) -> Result<Self> {
        let until = deadline.min(SystemClock.now() + connect_timeout);
        let url = address.to_string();
        let stream = dial(&address.endpoint, until).map_err(|error| {
            let code = match error.code() {
                ErrorCode::RPC_TIMEOUT => ErrorCode::RPC_TIMEOUT,
                _ => ErrorCode::RPC_FAIL,
            };
            let error = Error::new(code, texts.unreachable).with("url", &url).caused_by(error);
            texts.with_remedy(error)
        })?;
        // Otherwise a request may wait for an acknowledgement. A failure only costs speed.
        let _ = stream.set_nodelay(true);
        let socket = Arc::new(stream);
        let timed = DeadlineStream::new(Arc::clone(&socket), deadline);
        let stream = RespStream::new(timed, bytes_max, texts);
        let mut connection = Self { url, socket, stream, texts };
        let login = &address.login;
        if !login.username.is_empty() {
            connection.ask(&[b"AUTH", login.username.as_bytes(), login.password.as_bytes()])?;
        } else if !login.password.is_empty() {
            connection.ask(&[b"AUTH", login.password.as_bytes()])?;
        }
        if login.database != 0 {
            connection.ask(&[b"SELECT", login.database.to_string().as_bytes()])?;
        }
        Ok(connection)
    }

    /// The socket, so that another thread can shut it down.
    pub const fn socket(&self) -> &Arc<TcpStream> {
        &self.socket
    }

    /// Sets the deadline of later exchanges.
    pub const fn set_deadline(&mut self, deadline: Moment) {
        self.stream.stream_mut().set_deadline(deadline);
    }

    /// Sends a command; an error reply becomes an error.
    ///
    /// # Errors
    /// The connection broke, the deadline passed, or the server refused the command.
    pub fn ask(&mut self, words: &[&[u8]]) -> Result<Reply> {
        let reply = self.stream.ask(words);
        self.checked(reply)
    }

    /// Reads a message that the server sends unasked, as to a subscriber.
    ///
    /// # Errors
    /// Those of [`ask`](Self::ask).
    pub fn receive(&mut self) -> Result<Reply> {
        let reply = self.stream.receive();
        self.checked(reply)
    }

    /// The error of a reply of an unexpected kind.
    pub fn unexpected_reply(&self, reply: &Reply) -> Error {
        self.failed("the Redis server answered something else", &format!("{reply:?}"))
    }

    /// An error with the address of the server and what it answered.
    pub fn failed(&self, text: &str, answer: &str) -> Error {
        Error::new(ErrorCode::RPC_FAIL, text).with("url", &self.url).with("answer", answer)
    }

    fn checked(&self, reply: Result<Reply>) -> Result<Reply> {
        match reply.map_err(|error| error.with("url", &self.url))? {
            Reply::Error(text) => Err(self.failed(self.texts.refused, &text)),
            reply => Ok(reply),
        }
    }
}
