//! Messages as tonic encodes them, in buffers that begin small.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{BufferSettings, Codec};
use tonic_prost::ProstCodec;

/// Bytes of a stream's buffer before it grows. tonic begins with 8 KiB each way, and a coordinator has
/// thousands of streams, whose messages have a few hundred bytes.
const BEGINS_WITH: usize = 1 << 10;
/// Bytes of messages that wait for each other before they are sent; tonic's.
const SENT_AT: usize = 32 << 10;

/// Encodes `T` and decodes `U`.
#[derive(Debug)]
pub struct SmallBuffers<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for SmallBuffers<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for SmallBuffers<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = <ProstCodec<T, U> as Codec>::Encoder;
    type Decoder = <ProstCodec<T, U> as Codec>::Decoder;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(BufferSettings::new(BEGINS_WITH, SENT_AT))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(BufferSettings::new(BEGINS_WITH, SENT_AT))
    }
}
