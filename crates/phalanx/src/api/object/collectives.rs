//! The collectives of objects.

use super::{Packed, at_root, unpack};
use crate::api::comm::Comm;
use crate::types::error::Result;
use serde::Serialize;
use serde::de::DeserializeOwned;

impl Comm {
    /// Copies the root's object to every rank. The root passes `Some` and gets it back; what others pass is dropped.
    ///
    /// mpi4py's `bcast`, torch's `broadcast_object_list`.
    ///
    /// # Errors
    /// [`ObjectError`](crate::ObjectError); [`UsageError`](crate::UsageError) for `None` at the root.
    #[doc(alias("bcast", "broadcast_object_list"))]
    pub fn broadcast_object<T>(&self, object: Option<T>, root: usize) -> Result<T>
    where
        T: Serialize + DeserializeOwned,
    {
        let operation = "broadcast_object";
        self.shape().check_rank(operation, "root", root)?;
        let own = if self.rank() == root { Some(at_root(operation, object, root)?) } else { None };
        let packed = Packed::of(own.as_ref().map(Some));
        let lengths = self.agree_on_objects::<T>(operation, root, &packed)?;
        let mut bytes = if own.is_some() { packed.bytes } else { vec![0; lengths[root]] };
        self.broadcast_in_place(&mut bytes, root)?;
        own.map_or_else(|| unpack(operation, root, &bytes), Ok)
    }

    /// Collects all ranks' objects at the root, in rank order. Other ranks get `None`.
    ///
    /// mpi4py's `gather`, torch's `gather_object`.
    ///
    /// # Errors
    /// [`ObjectError`](crate::ObjectError).
    pub fn gather_object<T>(&self, object: &T, root: usize) -> Result<Option<Vec<T>>>
    where
        T: Serialize + DeserializeOwned,
    {
        let operation = "gather_object";
        self.shape().check_rank(operation, "root", root)?;
        let packed = Packed::of([Some(object)]);
        let lengths = self.agree_on_objects::<T>(operation, root, &packed)?;
        let is_root = self.rank() == root;
        let mut all = vec![0; if is_root { lengths.iter().sum() } else { 0 }];
        self.gather_v(&packed.bytes, &mut all, &lengths, root)?;
        is_root.then(|| unpack_each(operation, &all, &lengths)).transpose()
    }

    /// Collects all ranks' objects on every rank, in rank order.
    ///
    /// mpi4py's `allgather`, torch's `all_gather_object`. serde writes a `Vec<u8>` byte by byte: bytes go faster in a `ByteBuf`
    /// of the crate serde_bytes.
    ///
    /// # Errors
    /// [`ObjectError`](crate::ObjectError).
    #[doc(alias = "allgather")]
    pub fn all_gather_object<T>(&self, object: &T) -> Result<Vec<T>>
    where
        T: Serialize + DeserializeOwned,
    {
        let operation = "all_gather_object";
        let (all, lengths) = self.all_gather_packed::<T>(operation, object)?;
        unpack_each(operation, &all, &lengths)
    }

    /// All ranks' serialized objects, and their lengths.
    pub(in crate::api) fn all_gather_packed<T: Serialize>(
        &self,
        operation: &'static str,
        object: &T,
    ) -> Result<(Vec<u8>, Vec<usize>)> {
        let packed = Packed::of([Some(object)]);
        let lengths = self.agree_on_objects::<T>(operation, 0, &packed)?;
        let mut all = vec![0; lengths.iter().sum()];
        self.all_gather_v(&packed.bytes, &mut all, &lengths)?;
        Ok((all, lengths))
    }

    /// Gives each rank one of the root's objects: rank `r` gets `objects[r]`. The root passes `Some`, with as many objects as there are
    /// ranks; what others pass is dropped.
    ///
    /// mpi4py's `scatter`, torch's `scatter_object_list`.
    ///
    /// # Errors
    /// [`ObjectError`](crate::ObjectError); [`UsageError`](crate::UsageError) for `None` or another number of objects at the root.
    #[doc(alias = "scatter_object_list")]
    pub fn scatter_objects<T>(&self, objects: Option<Vec<T>>, root: usize) -> Result<T>
    where
        T: Serialize + DeserializeOwned,
    {
        let operation = "scatter_objects";
        self.shape().check_rank(operation, "root", root)?;
        let mut objects = if self.rank() == root { at_root(operation, objects, root)? } else { Vec::new() };
        if self.rank() == root {
            self.check_objects(operation, objects.len())?;
        }
        let packed = Packed::of(others(&objects, root));
        self.agree_on_objects::<T>(operation, root, &packed)?;
        let is_root = self.rank() == root;
        let mut lengths = if is_root { as_u64(&packed.lengths) } else { vec![0; self.world_size()] };
        self.broadcast_in_place(&mut lengths, root)?;
        let lengths = as_usize(&lengths);
        let mut bytes = vec![0; lengths[self.rank()]];
        self.scatter_v(&packed.bytes, &lengths, &mut bytes, root)?;
        if is_root { Ok(objects.swap_remove(root)) } else { unpack(operation, root, &bytes) }
    }

    /// Exchanges objects between all ranks: `objects[j]` of rank `i` becomes element `i` of rank `j`'s result.
    ///
    /// `objects` has one for each rank. mpi4py's `alltoall`.
    ///
    /// # Errors
    /// [`ObjectError`](crate::ObjectError); [`UsageError`](crate::UsageError) for another number of objects.
    pub fn all_to_all_objects<T>(&self, mut objects: Vec<T>) -> Result<Vec<T>>
    where
        T: Serialize + DeserializeOwned,
    {
        let (operation, rank) = ("all_to_all_objects", self.rank());
        self.check_objects(operation, objects.len())?;
        let packed = Packed::of(others(&objects, rank));
        self.agree_on_objects::<T>(operation, 0, &packed)?;
        let mut lengths = as_u64(&packed.lengths);
        self.all_to_all_in_place(&mut lengths)?;
        let lengths = as_usize(&lengths);
        let mut bytes = vec![0; lengths.iter().sum()];
        self.all_to_all_v(&packed.bytes, &packed.lengths, &mut bytes, &lengths)?;
        let mut own = Some(objects.swap_remove(rank));
        let received = blocks(&bytes, &lengths).enumerate().map(|(source, bytes)| {
            match own.take_if(|_| source == rank) {
                Some(own) => Ok(own),
                None => unpack(operation, source, bytes),
            }
        });
        received.collect()
    }
}

/// All objects but this rank's own, which does not travel.
fn others<T>(objects: &[T], own: usize) -> impl Iterator<Item = Option<&T>> {
    objects.iter().enumerate().map(move |(rank, object)| (rank != own).then_some(object))
}

fn unpack_each<T: DeserializeOwned>(
    operation: &'static str,
    all: &[u8],
    lengths: &[usize],
) -> Result<Vec<T>> {
    blocks(all, lengths).enumerate().map(|(rank, bytes)| unpack(operation, rank, bytes)).collect()
}

/// Contiguous blocks of these lengths.
pub(in crate::api) fn blocks<'a>(mut all: &'a [u8], lengths: &[usize]) -> impl Iterator<Item = &'a [u8]> {
    lengths.iter().map(move |length| {
        let (block, rest) = all.split_at(*length);
        all = rest;
        block
    })
}

fn as_u64(lengths: &[usize]) -> Vec<u64> {
    lengths.iter().map(|length| *length as u64).collect()
}

fn as_usize(lengths: &[u64]) -> Vec<usize> {
    lengths.iter().map(|length| *length as usize).collect()
}
