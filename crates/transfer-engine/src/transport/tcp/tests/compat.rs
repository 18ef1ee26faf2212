//! Both sides against hand-written counterparts of upstream's protocol, byte by byte.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::Duration,
};

use super::support::{Memory, Owner, WireProtocol, entries, outcomes, soon};
use crate::{
    discovery::descriptor::SegmentDescriptor,
    transfer_entry::Opcode,
    transport::{
        Transport,
        tcp::{TcpSettings, TcpTransport},
    },
};

const DONE: [u8; 8] = [0, 0, 0, 0, 0x56, 0x54, 0x43, 0x4D];
const UNSUPPORTED: [u8; 8] = [1, 0, 0, 0, 0x56, 0x54, 0x43, 0x4D];

fn header(length: u64, address: u64, opcode: u8) -> Vec<u8> {
    [&length.to_le_bytes()[..], &address.to_le_bytes(), &[opcode, 0, 0, 0, 0, 0, 0, 0]].concat()
}

fn read<const N: usize>(stream: &mut TcpStream) -> [u8; N] {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

fn dial(owner: &Owner) -> TcpStream {
    let stream = TcpStream::connect(owner.server.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

#[test]
fn serves_upstream_clients_of_version_2() {
    let (owner, theirs) = Owner::with_memory(16);
    let mut stream = dial(&owner);
    for round in 0..3 {
        stream.write_all(&header(4, theirs.address() + 2, 0x81)).unwrap();
        stream.write_all(&[round, 2, 3, 4]).unwrap();
        assert_eq!(read(&mut stream), DONE);
        assert_eq!(theirs.bytes()[2..6], [round, 2, 3, 4]);
        stream.write_all(&header(5, theirs.address() + 1, 0x80)).unwrap();
        assert_eq!(read(&mut stream), DONE);
        assert_eq!(read::<5>(&mut stream)[..], theirs.bytes()[1..6]);
    }
}

#[test]
fn refuses_bad_ranges_of_upstream_clients_and_closes() {
    for opcode in [0x80, 0x81] {
        let (owner, theirs) = Owner::with_memory(16);
        let before = theirs.bytes();
        let mut stream = dial(&owner);
        stream.write_all(&header(4, theirs.address() + 13, opcode)).unwrap();
        if opcode == 0x81 {
            stream.write_all(&[9; 4]).unwrap();
        }
        assert_eq!(read(&mut stream), UNSUPPORTED);
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        assert_eq!(theirs.bytes(), before);
    }
}

#[test]
fn serves_upstream_clients_of_version_1_without_status() {
    let (owner, theirs) = Owner::with_memory(16);
    let mut stream = dial(&owner);
    stream.write_all(&header(2, theirs.address(), 1)).unwrap();
    stream.write_all(&[5, 6]).unwrap();
    stream.write_all(&header(3, theirs.address(), 0)).unwrap();
    assert_eq!(read(&mut stream), [5, 6, theirs.bytes()[2]]);
    stream.write_all(&header(3, 8, 0)).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
}

#[test]
fn client_uses_version_2_with_upstream_servers() {
    // The server owns bytes 1000..1064 and closes after a refusal, like upstream's server.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = thread::spawn(move || {
        let mut memory: Vec<u8> = (0..64).collect();
        let mut requests = Vec::new();
        while requests.len() < 6 {
            let (mut stream, _) = listener.accept().unwrap();
            let mut bytes = [0; 24];
            while stream.read_exact(&mut bytes).is_ok() {
                let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
                let address = u64::from_le_bytes(bytes[8..16].try_into().unwrap()) as usize;
                requests.push(bytes[16]);
                if address < 1000 {
                    stream.write_all(&UNSUPPORTED).unwrap();
                    break;
                }
                let range = address - 1000..address - 1000 + length;
                if bytes[16] == 0x81 {
                    stream.read_exact(&mut memory[range]).unwrap();
                    stream.write_all(&DONE).unwrap();
                } else {
                    stream.write_all(&DONE).unwrap();
                    stream.write_all(&memory[range]).unwrap();
                }
                if requests.len() == 6 {
                    break;
                }
            }
        }
        (memory, requests)
    });
    let descriptor = SegmentDescriptor {
        name: "peer:1".into(),
        tcp_data_host: "127.0.0.1".into(),
        tcp_data_port: port,
        tcp_proto_version: 2,
        ..SegmentDescriptor::default()
    };
    let path = TcpTransport::new(TcpSettings::default()).connect(&descriptor, soon()).unwrap();
    let ours = Memory::patterned(30, 8);
    let remote = |index| if index == 1 { 8 } else { 1000 + index as u64 * 10 };
    let mut batch = entries(&ours, 10, remote);
    path.transfer(Opcode::Write, &mut batch, soon().into());
    assert_eq!(outcomes(&batch), [true, false, true]);
    let back = Memory::zeroed(30);
    let mut batch = entries(&back, 10, remote);
    path.transfer(Opcode::Read, &mut batch, soon().into());
    assert_eq!(outcomes(&batch), [true, false, true]);
    let (memory, requests) = server.join().unwrap();
    assert_eq!(requests, [0x81, 0x81, 0x81, 0x80, 0x80, 0x80]);
    for range in [0..10, 20..30] {
        assert_eq!(memory[range.clone()], ours.bytes()[range.clone()]);
        assert_eq!(back.bytes()[range.clone()], ours.bytes()[range]);
    }
}

#[test]
fn client_expects_no_status_from_version_1_peers() {
    let (owner, theirs) = Owner::with_memory(30);
    let path = owner.path(WireProtocol::CompatV1);
    let back = Memory::zeroed(30);
    let mut batch = entries(&back, 10, |index| theirs.address() + 10 * index as u64);
    batch[1] = back.part(10, 10, 8);
    path.transfer(Opcode::Read, &mut batch, soon().into());
    // Without a status a refusal looks like a lost peer.
    assert_eq!(outcomes(&batch), [true, false, false]);
}
