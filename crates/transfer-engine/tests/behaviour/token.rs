//! Engines that authenticate each other by a token, and the limit on peers.

use std::sync::Arc;

use mooncake_base::ErrorKind;
use mooncake_transfer_engine::{
    Engine, EngineConfig, Opcode, Token, TransportKind, discovery::handshake::Notification,
};

use crate::pair::{Lent, held, move_one, runtime, soon};

fn start(
    runtime: &tokio::runtime::Runtime,
    token: Option<&str>,
    disabled: &[TransportKind],
) -> Engine {
    let config = EngineConfig {
        name: "127.0.0.1".to_owned(),
        token: token.map(|token| Token::new(token).unwrap()),
        disabled: disabled.to_vec(),
        ..EngineConfig::default()
    };
    Engine::start(config, runtime.handle().clone()).unwrap()
}

const KINDS: [(TransportKind, &[TransportKind]); 2] = [
    (TransportKind::Shm, &[TransportKind::Memory, TransportKind::Tcp]),
    (TransportKind::Tcp, &[TransportKind::Memory, TransportKind::Shm]),
];

#[test]
fn engines_with_the_same_token_reach_each_other() {
    let runtime = runtime();
    for (kind, disabled) in KINDS {
        let far = start(&runtime, Some("correct horse"), &[]);
        let near = start(&runtime, Some("correct horse"), disabled);
        let peer = near.open(far.segment_name(), soon()).unwrap();
        assert_eq!(peer.transport(), Some(kind));
        let lent = Lent::shared(&far, 4096);
        move_one(&near, &peer, Opcode::Write, (held(&mut [3; 9]), lent.base())).unwrap();
    }
}

#[test]
fn wrong_or_missing_tokens_are_refused_and_counted() {
    let runtime = runtime();
    for (kind, disabled) in KINDS {
        let cases = [
            (Some("correct horse"), Some("another one")),
            (Some("correct horse"), None),
            (None, Some("correct horse")),
        ];
        for (there, here) in cases {
            let far = start(&runtime, there, &[]);
            let near = start(&runtime, here, disabled);
            let error = near.open(far.segment_name(), soon()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{kind} {error}");
            assert!(error.to_string().contains("token"), "{kind} {error}");
            assert!(near.snapshot().refused.token_there > 0, "{kind}");
            let page = near.snapshot().prometheus();
            assert!(page.contains("refused_total{reason=\"token_there\"} 1"), "{page}");
        }
    }
}

#[test]
fn notifications_require_the_token() {
    let runtime = runtime();
    let far = start(&runtime, Some("correct horse"), &[]);
    let message = Notification { name: "n".to_owned(), message: "m".to_owned() };
    for (here, is_taken) in
        [(None, false), (Some("another one"), false), (Some("correct horse"), true)]
    {
        let near = start(&runtime, here, &[]);
        let notified = near.notify(far.segment_name(), &message, soon());
        assert_eq!(notified.is_ok(), is_taken, "{notified:?}");
        assert_eq!(far.take_notifications().len(), usize::from(is_taken));
        assert_eq!(near.snapshot().refused.token_there, u64::from(!is_taken));
        near.probe(far.segment_name(), soon()).unwrap();
    }
    assert_eq!(far.snapshot().refused.token_here, 2);
    let bare = start(&runtime, None, &[]);
    let near = start(&runtime, Some("correct horse"), &[]);
    let error = near.notify(bare.segment_name(), &message, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    assert!(bare.take_notifications().is_empty());
}

#[test]
fn evicted_peers_stay_usable_for_their_holders() {
    let runtime = runtime();
    let config = EngineConfig {
        name: "127.0.0.1".to_owned(),
        peers_max: 2,
        disabled: vec![TransportKind::Memory, TransportKind::Shm],
        ..EngineConfig::default()
    };
    let near = Engine::start(config, runtime.handle().clone()).unwrap();
    let far: Vec<_> = (0..4).map(|_| start(&runtime, None, &[])).collect();
    let lent: Vec<_> = far.iter().map(|far| Lent::shared(far, 4096)).collect();
    let peers: Vec<_> =
        far.iter().map(|far| near.open(far.segment_name(), soon()).unwrap()).collect();
    let snapshot = near.snapshot();
    let kept: Vec<_> = snapshot.peers.iter().map(|peer| peer.name.clone()).collect();
    let mut newest: Vec<_> = far[2..].iter().map(|far| far.segment_name().to_owned()).collect();
    newest.sort();
    assert_eq!((kept, snapshot.peers_evicted), (newest, 2));
    for (peer, lent) in peers.iter().zip(&lent) {
        move_one(&near, peer, Opcode::Write, (held(&mut [3; 9]), lent.base())).unwrap();
    }
    // A peer that was evicted is opened again as a new object.
    let again = near.open(far[0].segment_name(), soon()).unwrap();
    assert!(!Arc::ptr_eq(&again, &peers[0]));
}
