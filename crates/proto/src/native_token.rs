//! How a native client and a master with a token prove to each other that they know it, without I/O.
//!
//! A master with a token greets with a *challenge*, random bytes that are new for each connection,
//! and tells nothing else of itself. The client answers with a [`ClientProof`]. Only then the master
//! names itself and its Unix socket, in a second greeting that carries its own proof, which also
//! covers what the greeting says. The frames that follow are neither encrypted nor authenticated.
//!
//! A master that does not lead refuses in its first greeting, beside the challenge. To those that prove
//! the token it says in the second one who leads, or why nobody does.

use mooncake_base::{
    Error, ErrorCode, Result, Token,
    token::{self, NONCE_BYTES, Nonce, Prover},
};
use prost::Message;

use crate::native_frame::{self, ServerGreeting};

/// A client's answer to a challenge, sent as a frame. The field numbers are not those of a
/// [`Request`](crate::v1::Request), which a client that knows no tokens sends instead.
#[derive(Clone, PartialEq, Message)]
pub struct ClientProof {
    /// The client's random bytes.
    #[prost(bytes = "vec", tag = "1001")]
    pub nonce: Vec<u8>,
    /// The keyed hash.
    #[prost(bytes = "vec", tag = "1002")]
    pub proof: Vec<u8>,
}

/// The proofs of a client, the caller, and a master on one connection.
#[derive(Debug, Clone)]
pub struct Exchange(token::Exchange);

/// The challenge of one connection, at the master.
#[derive(Debug)]
pub struct Challenge(Nonce);

impl Challenge {
    /// Creates the challenge of a new connection.
    #[expect(clippy::new_without_default, reason = "each one differs")]
    pub fn new() -> Self {
        Self(token::nonce())
    }

    /// Returns the first greeting of a master with a token.
    pub fn greeting(&self) -> ServerGreeting {
        ServerGreeting {
            version: native_frame::VERSION,
            challenge: self.0.to_vec(),
            ..ServerGreeting::default()
        }
    }

    /// Checks the client's proof. Returns the exchange that the master's own proof belongs to.
    ///
    /// # Errors
    /// `ILLEGAL_CLIENT`: the client has sent no proof, or has another token.
    pub fn check(self, token: &Token, answer: &ClientProof) -> Result<Exchange> {
        if answer.nonce.is_empty() && answer.proof.is_empty() {
            return Err(missing_token());
        }
        let (Ok(client), Ok(proof)) = (answer.nonce[..].try_into(), answer.proof[..].try_into())
        else {
            return Err(Error::new(ErrorCode::ILLEGAL_CLIENT, "the client's proof is malformed"));
        };
        let exchange = Exchange::new(self.0, client);
        if exchange.0.is_proven(token, Prover::Caller, &[], &proof) {
            return Ok(exchange);
        }
        let text = "the client has another token than the master; \
                    set MOONCAKE_MASTER_TOKEN to the token of the master";
        Err(Error::new(ErrorCode::ILLEGAL_CLIENT, text))
    }
}

/// The refusal of a client that shows no token.
pub fn missing_token() -> Error {
    let text = "the master serves only clients that know its token; set MOONCAKE_MASTER_TOKEN";
    Error::new(ErrorCode::ILLEGAL_CLIENT, text)
}

/// Proves the token to the server that sent this first greeting, if there is one, and has the server
/// prove it. A server that refuses beside a challenge gives its reason after the proof. `prove` sends the proof and returns the answer, which is the server's last greeting.
///
/// # Errors
/// The server's refusal, or `ILLEGAL_CLIENT`: only one side has a token, or the tokens differ.
pub fn authenticate(
    token: Option<&Token>,
    greeting: ServerGreeting,
    prove: impl FnOnce(&ClientProof) -> Result<ServerGreeting>,
) -> Result<ServerGreeting> {
    let refused = greeting.check_refusal();
    let Some(token) = token else {
        let is_open = greeting.challenge.is_empty();
        return if is_open { refused.map(|()| greeting) } else { Err(missing_token()) };
    };
    if greeting.challenge.is_empty() {
        refused.clone()?;
    }
    let (exchange, proof) = Exchange::answer(token, &greeting)?;
    match prove(&proof) {
        Ok(second) => exchange.check(token, &second).and(refused).map(|()| second),
        // Without a second greeting, the first one has said enough.
        Err(error) => Err(refused.err().unwrap_or(error)),
    }
}

impl Exchange {
    /// Answers the challenge in a master's first greeting.
    ///
    /// # Errors
    /// `ILLEGAL_CLIENT`: the master has no token.
    pub fn answer(token: &Token, greeting: &ServerGreeting) -> Result<(Self, ClientProof)> {
        if greeting.challenge.is_empty() {
            let text = "the master has no token, so that it cannot prove which pool it serves";
            return Err(Error::new(ErrorCode::ILLEGAL_CLIENT, text).with_remedy(
                "Start the master with MOONCAKE_MASTER_TOKEN, or give no token here.",
            ));
        }
        let Ok(master) = greeting.challenge[..].try_into() else {
            return Err(Error::new(ErrorCode::RPC_FAIL, "the master's challenge is malformed")
                .with("bytes", greeting.challenge.len())
                .with("expected", NONCE_BYTES));
        };
        let exchange = Self::new(master, token::nonce());
        let (nonce, proof) = (exchange.0.caller, exchange.0.proof(token, Prover::Caller, &[]));
        Ok((exchange, ClientProof { nonce: nonce.to_vec(), proof: proof.to_vec() }))
    }

    /// Adds the master's proof to its second greeting.
    pub fn seal(&self, token: &Token, greeting: &mut ServerGreeting) {
        greeting.proof = self.0.proof(token, Prover::Callee, &content(greeting)).to_vec();
    }

    /// Checks a master's second greeting.
    ///
    /// # Errors
    /// The master's refusal, or `ILLEGAL_CLIENT`: the peer has not proven the token.
    pub fn check(&self, token: &Token, greeting: &ServerGreeting) -> Result<()> {
        greeting.check_refusal()?;
        let is_proven = (greeting.proof[..].try_into())
            .is_ok_and(|proof| self.0.is_proven(token, Prover::Callee, &content(greeting), &proof));
        if is_proven {
            return Ok(());
        }
        let text = "the peer at the master's address has not proven MOONCAKE_MASTER_TOKEN";
        Err(Error::new(ErrorCode::ILLEGAL_CLIENT, text))
    }

    fn new(master: Nonce, client: Nonce) -> Self {
        let (callee, caller) = (master, client);
        Self(token::Exchange { protocol: b"mooncake master 1", scope: Vec::new(), callee, caller })
    }
}

/// The part of a master's second greeting that its proof covers.
fn content(greeting: &ServerGreeting) -> Vec<u8> {
    let length = greeting.master.len() as u64;
    [&length.to_le_bytes()[..], &greeting.master, greeting.unix_socket.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(secret: &str) -> Token {
        Token::new(secret).unwrap()
    }

    fn full_greeting() -> ServerGreeting {
        ServerGreeting {
            version: native_frame::VERSION,
            master: vec![7; 16],
            unix_socket: "mooncake-master-7".to_owned(),
            ..ServerGreeting::default()
        }
    }

    #[test]
    fn sides_with_the_same_token_accept_each_other() {
        let ours = token("open sesame");
        let challenge = Challenge::new();
        let (at_client, proof) = Exchange::answer(&ours, &challenge.greeting()).unwrap();
        let at_master = challenge.check(&ours, &proof).unwrap();
        let mut greeting = full_greeting();
        at_master.seal(&ours, &mut greeting);
        at_client.check(&ours, &greeting).unwrap();
    }

    #[test]
    fn client_and_server_authenticate_each_other() {
        let ours = token("open sesame");
        let challenge = Challenge::new();
        let greeting = authenticate(Some(&ours), challenge.greeting(), |proof| {
            let mut greeting = full_greeting();
            challenge.check(&ours, proof)?.seal(&ours, &mut greeting);
            Ok(greeting)
        });
        assert_eq!(greeting.unwrap().unix_socket, "mooncake-master-7");
        let silent =
            |_: &ClientProof| -> Result<ServerGreeting> { panic!("nothing is to be proven") };
        assert_eq!(authenticate(None, full_greeting(), silent).unwrap(), full_greeting());
        let refusal = Some((&missing_token()).into());
        for (token, greeting) in [
            (None, Challenge::new().greeting()),
            (Some(&ours), full_greeting()),
            (Some(&ours), ServerGreeting { refusal, ..full_greeting() }),
        ] {
            let error = authenticate(token, greeting, silent).unwrap_err();
            assert_eq!(error.code(), ErrorCode::ILLEGAL_CLIENT, "{error}");
        }
    }

    #[test]
    fn reason_of_a_refusal_is_told_after_the_proof() {
        let ours = token("open sesame");
        let refusing = |why: &str| {
            let refusal = Some((&Error::closed(why)).into());
            ServerGreeting { refusal, ..ServerGreeting::default() }
        };
        let greeted = |challenge: &Challenge| ServerGreeting {
            refusal: refusing("it does not lead").refusal,
            ..challenge.greeting()
        };
        let told = |token: Option<&Token>, answer: fn(ServerGreeting) -> Result<ServerGreeting>| {
            let challenge = Challenge::new();
            let greeting = greeted(&challenge);
            let second = |proof: &ClientProof| {
                challenge.check(&ours, proof)?;
                answer(refusing("b leads"))
            };
            authenticate(token, greeting, second).unwrap_err().to_string()
        };
        assert!(told(Some(&ours), Ok).contains("b leads"));
        let hung_up = |_| Err(Error::closed("it hung up"));
        assert!(told(Some(&ours), hung_up).contains("it does not lead"));
        let not_refused = |_| Ok(ServerGreeting::default());
        assert!(told(Some(&ours), not_refused).contains("has not proven"));
        let stranger = told(None, |_| panic!("it proves nothing"));
        assert!(!stranger.contains("lead") && stranger.contains("token"), "{stranger}");
    }

    #[test]
    fn proofs_are_those_of_the_protocol() {
        let Exchange(exchange) = Exchange::new([1; 32], [2; 32]);
        let of = |side, content: &[u8]| {
            token::hex(&exchange.proof(&token("a long secret"), side, content))
        };
        assert_eq!(
            of(Prover::Caller, &[]),
            "3047e9d45d3d4b093cb1718ef672d7607b994c9c4f5b405d3ad1afb8527edbda"
        );
        assert_eq!(
            of(Prover::Callee, &content(&full_greeting())),
            "04d2dfa26fee434c0189c81cdb7a63c5dbf4589bad4c95cdd0bfef3c44cbfd13"
        );
    }

    #[test]
    fn proof_is_bound_to_token_challenge_and_side() {
        let ours = token("open sesame");
        let challenge = Challenge::new();
        let first = challenge.greeting();
        let (exchange, proof) = Exchange::answer(&ours, &first).unwrap();
        let check = |challenge: Nonce, token: &Token, proof: &ClientProof| {
            Challenge(challenge).check(token, proof).map(drop)
        };
        check(challenge.0, &ours, &proof).unwrap();
        assert!(check(challenge.0, &token("open sesamE"), &proof).is_err());
        assert!(check(token::nonce(), &ours, &proof).is_err(), "said on another connection");
        let reflected = ClientProof {
            nonce: proof.nonce.clone(),
            proof: exchange.0.proof(&ours, Prover::Callee, &[]).to_vec(),
        };
        assert!(check(challenge.0, &ours, &reflected).is_err(), "the master's own proof");
        for at in 0..proof.proof.len() {
            let mut bad = proof.clone();
            bad.proof[at] ^= 1;
            assert!(check(challenge.0, &ours, &bad).is_err(), "{at}");
            bad.proof.truncate(at);
            assert!(check(challenge.0, &ours, &bad).is_err(), "{at}");
        }
    }

    #[test]
    fn greeting_of_master_is_bound_to_its_content() {
        let ours = token("open sesame");
        let (exchange, proof) = Exchange::answer(&ours, &Challenge::new().greeting()).unwrap();
        let mut good = full_greeting();
        exchange.seal(&ours, &mut good);
        exchange.check(&ours, &good).unwrap();
        for bad in [
            full_greeting(),
            ServerGreeting { proof: proof.proof, ..full_greeting() },
            ServerGreeting { master: vec![8; 16], ..good.clone() },
            ServerGreeting { unix_socket: "mooncake-master-8".to_owned(), ..good.clone() },
        ] {
            let error = exchange.check(&ours, &bad).unwrap_err();
            assert_eq!(error.code(), ErrorCode::ILLEGAL_CLIENT, "{bad:?}");
        }
    }

    #[test]
    fn errors_name_the_variable() {
        let ours = token("open sesame");
        let (_, wrong) =
            Exchange::answer(&token("another one"), &Challenge::new().greeting()).unwrap();
        let refused = |proof: &ClientProof| Challenge::new().check(&ours, proof).unwrap_err();
        let without = Exchange::answer(&ours, &full_greeting()).unwrap_err();
        for error in [refused(&wrong), refused(&ClientProof::default()), without] {
            assert_eq!(error.code(), ErrorCode::ILLEGAL_CLIENT);
            let told = format!("{error} {}", error.remedy());
            assert!(told.contains("MOONCAKE_MASTER_TOKEN"), "{told}");
        }
    }

    #[test]
    fn request_of_a_client_without_tokens_is_no_proof() {
        use crate::v1::{Request, StatusRequest, request::Call};
        let call = Some(Call::Status(StatusRequest::default()));
        let request = Request { call, ..Default::default() }.encode_to_vec();
        assert_eq!(ClientProof::decode(&request[..]).unwrap(), ClientProof::default());
    }
}
