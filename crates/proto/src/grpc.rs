//! The codec of the gRPC service: prost's codec with our decode limits.

use std::marker::PhantomData;

use prost::Message;
use tonic::{
    Status,
    codec::{Codec, DecodeBuf, Decoder},
};
use tonic_prost::{ProstCodec, ProstEncoder};

use crate::decode_limits;

/// A gRPC message is the call itself, so its items are one level down.
const ITEM_LEVELS: u32 = 1;

/// A codec that encodes `T` and decodes `U` within limits.
#[derive(Debug)]
pub struct LimitedCodec<T, U> {
    kinds: PhantomData<(T, U)>,
}

impl<T, U> Default for LimitedCodec<T, U> {
    fn default() -> Self {
        Self { kinds: PhantomData }
    }
}

impl<T, U> Codec for LimitedCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = LimitedDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::default().encoder()
    }

    fn decoder(&mut self) -> Self::Decoder {
        LimitedDecoder { kind: PhantomData }
    }
}

/// A decoder of `U` within limits.
#[derive(Debug)]
pub struct LimitedDecoder<U> {
    kind: PhantomData<U>,
}

impl<U: Message + Default> Decoder for LimitedDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        decode_limits::decode(from, ITEM_LEVELS).map(Some).map_err(|error| {
            Status::invalid_argument(format!("{}: {}", error.code().name(), error.message()))
        })
    }
}
