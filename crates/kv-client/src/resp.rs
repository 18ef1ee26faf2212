//! The Redis protocol (RESP 2): commands as arrays of byte strings, replies of five kinds.

use std::io::{self, Read, Write};

use mooncake_base::{Error, ErrorCode, Result};

use crate::ErrorTexts;

/// Maximum length of a line: a number, a status or an error message.
const LINE_BYTES_MAX: usize = 4096;

/// Maximum length and nesting of arrays. Replies of short transactions need no more.
const ARRAY_MAX: usize = 64;
const DEPTH_MAX: usize = 2;

/// A reply of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// A status, such as `OK`.
    Status(String),
    /// An error message.
    Error(String),
    /// A number.
    Integer(i64),
    /// A string of bytes.
    Bytes(Vec<u8>),
    /// The null of a string or an array.
    Null,
    /// An array of replies.
    Array(Vec<Self>),
}

/// A connection for alternating commands and replies.
#[derive(Debug)]
pub struct RespStream<S> {
    stream: S,
    /// Received bytes, and the offset of the first unread one.
    buffer: Vec<u8>,
    at: usize,
    /// Maximum length of a string.
    bytes_max: usize,
    texts: &'static ErrorTexts,
}

impl<S: Read + Write> RespStream<S> {
    /// Wraps a connection; replies hold strings of at most `bytes_max` bytes.
    pub const fn new(stream: S, bytes_max: usize, texts: &'static ErrorTexts) -> Self {
        Self { stream, buffer: Vec::new(), at: 0, bytes_max, texts }
    }

    /// The connection.
    pub const fn stream_mut(&mut self) -> &mut S {
        &mut self.stream
    }

    /// Sends a command and reads its reply.
    ///
    /// # Errors
    /// The connection is closed, the deadline passes, or the answer is not a RESP reply.
    pub fn ask(&mut self, words: &[&[u8]]) -> Result<Reply> {
        let command = encoded(words);
        let mut rest = &command[..];
        while !rest.is_empty() {
            match self.stream.write(rest) {
                Ok(0) => return Err(self.broken(io::ErrorKind::WriteZero.into())),
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.broken(error)),
            }
        }
        self.receive()
    }

    /// Reads a reply.
    ///
    /// # Errors
    /// Those of [`ask`](Self::ask).
    pub fn receive(&mut self) -> Result<Reply> {
        self.reply(0)
    }

    fn reply(&mut self, depth: usize) -> Result<Reply> {
        let line = self.line()?;
        let (kind, text) = line.split_at_checked(1).ok_or_else(|| invalid_reply(&line))?;
        match kind {
            "+" => Ok(Reply::Status(text.to_owned())),
            "-" => Ok(Reply::Error(text.to_owned())),
            ":" => text.parse().map(Reply::Integer).map_err(|_| invalid_reply(&line)),
            "$" => match length(text, self.bytes_max).ok_or_else(|| invalid_reply(&line))? {
                None => Ok(Reply::Null),
                Some(length) => self.bytes(length).map(Reply::Bytes),
            },
            "*" if depth < DEPTH_MAX => {
                let Some(count) = length(text, ARRAY_MAX).ok_or_else(|| invalid_reply(&line))?
                else {
                    return Ok(Reply::Null);
                };
                (0..count).map(|_| self.reply(depth + 1)).collect::<Result<_>>().map(Reply::Array)
            }
            _ => Err(invalid_reply(&line)),
        }
    }

    /// Reads a line without its end.
    fn line(&mut self) -> Result<String> {
        loop {
            let seen = &self.buffer[self.at..];
            if let Some(end) = seen.windows(2).position(|pair| pair == b"\r\n") {
                let line = String::from_utf8_lossy(&seen[..end]).into_owned();
                self.at += end + 2;
                return Ok(line);
            }
            if seen.len() > LINE_BYTES_MAX {
                return Err(invalid_reply(&String::from_utf8_lossy(&seen[..64])));
            }
            self.fill()?;
        }
    }

    /// Reads `length` bytes and a line end.
    fn bytes(&mut self, length: usize) -> Result<Vec<u8>> {
        while self.buffer.len() - self.at < length + 2 {
            self.fill()?;
        }
        let bytes = self.buffer[self.at..self.at + length].to_vec();
        let end = &self.buffer[self.at + length..self.at + length + 2];
        if end != b"\r\n" {
            return Err(invalid_reply("a string without an end"));
        }
        self.at += length + 2;
        Ok(bytes)
    }

    fn fill(&mut self) -> Result<()> {
        self.buffer.drain(..self.at);
        self.at = 0;
        let mut part = [0; 16 << 10];
        loop {
            match self.stream.read(&mut part) {
                Ok(0) => return Err(self.broken(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => {
                    self.buffer.extend_from_slice(&part[..count]);
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.broken(error)),
            }
        }
    }

    fn broken(&self, source: io::Error) -> Error {
        let error = match source.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => self.texts.late(),
            _ => Error::new(ErrorCode::RPC_FAIL, self.texts.broken),
        };
        error.caused_by(source)
    }
}

fn encoded(words: &[&[u8]]) -> Vec<u8> {
    let mut command = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        command.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        command.extend_from_slice(word);
        command.extend_from_slice(b"\r\n");
    }
    command
}

/// Parses a length up to a limit. `Some(None)` is the length -1 of a null reply; `None` is invalid.
fn length(text: &str, limit: usize) -> Option<Option<usize>> {
    if text == "-1" {
        return Some(None);
    }
    text.parse().ok().filter(|length| *length <= limit).map(Some)
}

fn invalid_reply(what: &str) -> Error {
    let what: String = what.chars().take(64).collect();
    Error::new(ErrorCode::RPC_FAIL, "the server does not speak the Redis protocol")
        .with("answer", what)
}

#[cfg(test)]
mod tests {
    use mooncake_base::fuzz::{self, Target, outcome};

    use super::*;
    use crate::texts::TEST_TEXTS;

    const BYTES_MAX: usize = 1 << 20;

    /// A server that has sent everything, a few bytes at a time.
    #[derive(Debug)]
    struct Script {
        sent: Vec<u8>,
        step: usize,
        received: Vec<u8>,
    }

    impl Read for Script {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let count = self.step.min(self.sent.len()).min(buffer.len());
            buffer[..count].copy_from_slice(&self.sent[..count]);
            self.sent.drain(..count);
            Ok(count)
        }
    }

    impl Write for Script {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let count = bytes.len().min(self.step);
            self.received.extend_from_slice(&bytes[..count]);
            Ok(count)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn stream(sent: &[u8], step: usize) -> RespStream<Script> {
        let script = Script { sent: sent.to_vec(), step, received: Vec::new() };
        RespStream::new(script, BYTES_MAX, &TEST_TEXTS)
    }

    #[test]
    fn reads_replies_of_every_kind_in_any_fragments() {
        let wanted = [
            Reply::Status("OK".into()),
            Reply::Error("ERR no".into()),
            Reply::Integer(-7),
            Reply::Null,
            Reply::Bytes(Vec::new()),
            Reply::Bytes(b"a\r\nb".to_vec()),
            Reply::Array(vec![Reply::Integer(1), Reply::Bytes(b"x".to_vec())]),
            Reply::Null,
            Reply::Array(Vec::new()),
        ];
        for step in [1, 2, 3, 7, 1000] {
            let mut stream = stream(ALL_KINDS, step);
            for wanted in &wanted {
                assert_eq!(stream.ask(&[b"PING"]).unwrap(), *wanted);
            }
            let ended = stream.ask(&[b"PING"]).unwrap_err();
            assert!(ended.to_string().contains("broke"), "{ended}");
        }
    }

    #[test]
    fn command_is_an_array_of_byte_strings() {
        let mut stream = stream(b"+OK\r\n", 2);
        stream.ask(&[b"SET", b"k\r\n", b""]).unwrap();
        assert_eq!(stream.stream.received, b"*3\r\n$3\r\nSET\r\n$3\r\nk\r\n\r\n$0\r\n\r\n");
    }

    #[test]
    fn rejects_invalid_replies_without_allocating_for_them() {
        let huge = format!("${}\r\n", BYTES_MAX + 1);
        let endless = vec![b'x'; 100_000];
        let nested = b"*1\r\n*1\r\n*1\r\n:1\r\n".to_vec();
        for sent in [
            b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
            b"\r\n".to_vec(),
            b":x\r\n".to_vec(),
            b"$-2\r\n".to_vec(),
            b"*65\r\n".to_vec(),
            b"$1\r\nabc\r\n".to_vec(),
            "é\r\n".as_bytes().to_vec(),
            b"\xFF\xFF\r\n".to_vec(),
            huge.into_bytes(),
            endless,
            nested,
        ] {
            let error = stream(&sent, 1000).ask(&[b"GET", b"k"]).unwrap_err();
            assert!(error.to_string().contains("not speak the Redis protocol"), "{error}");
        }
    }

    const ALL_KINDS: &[u8] = b"+OK\r\n-ERR no\r\n:-7\r\n$-1\r\n$0\r\n\r\n$4\r\na\r\nb\r\n*2\r\n:1\r\n$1\r\nx\r\n*-1\r\n*0\r\n";

    /// Replies one after another, until one is invalid.
    #[test]
    fn fuzzed_replies_decode_to_what_is_encoded() {
        let seeds = vec![ALL_KINDS.to_vec(), b"+OK\r\n".to_vec(), b"*1\r\n*1\r\n:1\r\n".to_vec()];
        fuzz::check(&[Target { name: "redis replies", seeds, run: replies }]);
    }

    fn replies(bytes: &[u8]) -> u64 {
        let mut stream = stream(bytes, 1000);
        let mut read = Vec::new();
        let error = loop {
            match stream.reply(0) {
                Ok(reply) => read.push(reply),
                Err(error) => break error,
            }
        };
        let mut again = Vec::new();
        read.iter().for_each(|reply| encode(reply, &mut again));
        let mut stream = self::stream(&again, 7);
        for reply in &read {
            assert_eq!(stream.reply(0).expect("we wrote it"), *reply);
        }
        let kinds: Vec<_> = read.iter().map(std::mem::discriminant).collect();
        outcome((kinds, error.message().to_owned()))
    }

    fn encode(reply: &Reply, into: &mut Vec<u8>) {
        match reply {
            Reply::Status(text) => into.extend_from_slice(format!("+{text}\r\n").as_bytes()),
            Reply::Error(text) => into.extend_from_slice(format!("-{text}\r\n").as_bytes()),
            Reply::Integer(number) => into.extend_from_slice(format!(":{number}\r\n").as_bytes()),
            Reply::Null => into.extend_from_slice(b"$-1\r\n"),
            Reply::Bytes(bytes) => {
                into.extend_from_slice(format!("${}\r\n", bytes.len()).as_bytes());
                into.extend_from_slice(bytes);
                into.extend_from_slice(b"\r\n");
            }
            Reply::Array(list) => {
                into.extend_from_slice(format!("*{}\r\n", list.len()).as_bytes());
                list.iter().for_each(|reply| encode(reply, into));
            }
        }
    }
}
