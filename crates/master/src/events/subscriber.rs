//! The connection of one subscriber.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use mooncake_base::{Result, counter::Counter};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, tcp::OwnedWriteHalf},
    sync::broadcast::{self, error::RecvError},
    time::timeout,
};

use super::zmtp::{self, GREETING_BYTES, SubscriberMessage, broken};

/// The deadline of the handshake.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(10);

/// The deadline for writing a message.
const WRITE_DEADLINE: Duration = Duration::from_secs(30);

/// Serves the subscriber until it disconnects or the publisher ends.
///
/// # Errors
/// The peer violated the protocol, or the connection broke.
pub(super) async fn serve(
    stream: TcpStream,
    mut messages: broadcast::Receiver<Bytes>,
    missed: &Counter,
) -> Result<()> {
    let (mut reader, mut writer) = stream.into_split();
    let mut input = BytesMut::with_capacity(512);
    let greeting = async {
        write(&mut writer, &zmtp::greeting()).await?;
        loop {
            if let Some(greeting) = input.first_chunk::<GREETING_BYTES>() {
                break zmtp::check_greeting(greeting)?;
            }
            read(&mut reader, &mut input).await?;
        }
        let _ = input.split_to(GREETING_BYTES);
        write(&mut writer, &zmtp::ready()).await?;
        loop {
            match zmtp::take(&mut input)? {
                Some(SubscriberMessage::Ready) => return Ok(()),
                Some(_) => return Err(broken("the subscriber did not send READY first")),
                None => read(&mut reader, &mut input).await?,
            }
        }
    };
    timeout(HANDSHAKE_DEADLINE, greeting)
        .await
        .map_err(|_| broken("the subscriber did not finish the handshake in time"))??;
    // The topic of all messages is empty, so that only a subscription to everything matches.
    let mut subscriptions = 0_u32;
    loop {
        while let Some(message) = zmtp::take(&mut input)? {
            match message {
                SubscriberMessage::Subscribe(topic) if topic.is_empty() => {
                    if subscriptions == 0 {
                        // Messages published before the subscription are not delivered.
                        messages = messages.resubscribe();
                    }
                    subscriptions = subscriptions.saturating_add(1);
                }
                SubscriberMessage::Cancel(topic) if topic.is_empty() => {
                    subscriptions = subscriptions.saturating_sub(1);
                }
                SubscriberMessage::Ping(pong) => write(&mut writer, &pong).await?,
                _ => {}
            }
        }
        tokio::select! {
            came = read(&mut reader, &mut input) => came?,
            message = messages.recv(), if subscriptions > 0 => match message {
                Ok(message) => {
                    let written = write(&mut writer, &message).await;
                    // When the connection breaks, this message and all queued messages are missed.
                    written.inspect_err(|_| {
                        missed.add(1 + messages.len() as u64);
                    })?;
                }
                Err(RecvError::Lagged(count)) => {
                    missed.add(count);
                }
                Err(RecvError::Closed) => return Ok(()),
            },
        }
    }
}

async fn read(reader: &mut (impl AsyncReadExt + Unpin), input: &mut BytesMut) -> Result<()> {
    let broke = |source: std::io::Error| broken("the connection broke").caused_by(source);
    match reader.read_buf(input).await.map_err(broke)? {
        0 => Err(broken("the subscriber closed its connection")),
        _ => Ok(()),
    }
}

async fn write(writer: &mut OwnedWriteHalf, bytes: &[u8]) -> Result<()> {
    match timeout(WRITE_DEADLINE, writer.write_all(bytes)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(source)) => Err(broken("the connection broke").caused_by(source)),
        Err(_) => Err(broken("the subscriber does not read its messages")),
    }
}
