//! Objects that could not be exchanged.

use std::fmt;

crate::types::error::debug_is_the_message!(ObjectError);

/// An object that could not be exchanged. The communicator works on.
///
/// A collective answers the same error on every rank, except for [`Deserialize`](ObjectError::Deserialize) and [`Bytes`](ObjectError::Bytes). A rank that sends a message
/// is not told what its receiver answers.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ObjectError {
    /// An object's `Serialize` failed or panicked.
    #[error("{operation}: the object of rank {rank} could not be serialized: {reason}")]
    Serialize {
        /// The operation.
        operation: &'static str,
        /// The object's rank.
        rank: usize,
        /// What postcard or the panic says.
        reason: String,
    },
    /// The bytes that arrived are no object of the type. This rank alone knows it.
    #[error("{operation}: the {bytes} bytes from rank {rank} are no {type_name}: {reason}")]
    Deserialize {
        /// The operation.
        operation: &'static str,
        /// The rank that sent them.
        rank: usize,
        /// The type that was expected.
        type_name: &'static str,
        /// How many bytes arrived.
        bytes: usize,
        /// What postcard says.
        reason: String,
    },
    /// The bytes of an [`Unchecked`](crate::Unchecked) element are no value of its type. This rank alone knows it.
    #[error("element {index} is no {type_name}: its bytes are {bytes:02x?}")]
    Bytes {
        /// The type that was expected.
        type_name: &'static str,
        /// The element.
        index: usize,
        /// Its bytes.
        bytes: Vec<u8>,
    },
    /// A serialized object is longer than the limit. Its bytes were not sent.
    #[error(
        "{operation}: the object of rank {rank} takes {bytes} bytes, the limit is {limit}; send it in parts, or raise the limit on every \
         rank with Comm::set_object_limit"
    )]
    TooLong {
        /// The operation.
        operation: &'static str,
        /// The object's rank.
        rank: usize,
        /// Length of the serialized object.
        bytes: u64,
        /// The smallest of the ranks' limits.
        limit: u64,
    },
    /// Two ranks exchange objects of different types, or by different operations.
    #[error(
        "mismatched call: rank {rank} called {theirs} where rank {other_rank} called {ours}; every rank must exchange objects of the same \
         type by the same call"
    )]
    Mismatch {
        /// The rank that differs.
        rank: usize,
        /// What it called, with the type.
        theirs: String,
        /// The rank it was compared with.
        other_rank: usize,
        /// What `other_rank` called, with the type.
        ours: String,
    },
}
