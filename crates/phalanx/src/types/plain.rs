//! [`PlainType`]: types of plain data, as values. A type is known by its name and size, and between ranks by a hash of both.

use std::cmp::Ordering as Order;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A type of plain data that is no number, such as a struct.
#[derive(Clone, Copy)]
pub struct PlainType(&'static Description);

struct Description {
    name: &'static str,
    size: usize,
    fingerprint: u32,
}

/// A type that this process has used, or heard of: a node of a list that only grows. A program uses few.
struct KnownType {
    description: Description,
    next: AtomicPtr<KnownType>,
}

static KNOWN: AtomicPtr<KnownType> = AtomicPtr::new(null_mut());

/// The longest element that a closure can combine, in bytes: one fits every step of every algorithm.
pub(crate) const MOST_COMBINED_BYTES: usize = 2 << 10;

/// Bits of a fingerprint.
const BITS: u32 = 24;

impl PlainType {
    /// `T` as a value. Reads a few words; allocates when the type is used for the first time.
    #[inline]
    pub(crate) fn of<T: Copy + 'static>() -> PlainType {
        const { assert!(size_of::<T>() > 0, "an element without bytes cannot be sent") };
        const { assert!(size_of::<T>() < 1 << 30, "an element of a GiB or more: send its parts as elements") };
        let name = std::any::type_name::<T>();
        // The address of the name is enough; in another compilation unit it may be another.
        let is_it = |known: &Description| std::ptr::eq(known.name, name) && known.size == size_of::<T>();
        find(is_it)
            .unwrap_or_else(|| add(name, size_of::<T>(), fingerprint(name, size_of::<T>(), align_of::<T>())))
    }

    /// The type with this fingerprint, if this process has used it; else one of one byte whose name says that it is unknown.
    pub(crate) fn with_fingerprint(fingerprint: u32) -> PlainType {
        find(|known| known.fingerprint == fingerprint).unwrap_or_else(|| {
            let name = format!("plain data #{fingerprint:06x}, unknown to this rank");
            add(Box::leak(name.into_boxed_str()), 1, fingerprint)
        })
    }

    /// Bytes of an element.
    pub const fn size(self) -> usize {
        self.0.size
    }

    /// The path of the Rust type, as [`std::any::type_name`] gives it.
    pub const fn name(self) -> &'static str {
        self.0.name
    }

    pub(crate) const fn fingerprint(self) -> u32 {
        self.0.fingerprint
    }
}

#[inline]
fn find(is_it: impl Fn(&Description) -> bool) -> Option<PlainType> {
    let mut next = KNOWN.load(Ordering::Acquire);
    // SAFETY: null, or a node that was leaked and published with release.
    while let Some(known) = unsafe { next.as_ref() } {
        if is_it(&known.description) {
            return Some(PlainType(&known.description));
        }
        next = known.next.load(Ordering::Relaxed);
    }
    None
}

#[cold]
fn add(name: &'static str, size: usize, fingerprint: u32) -> PlainType {
    let description = Description { name, size, fingerprint };
    let mut head = KNOWN.load(Ordering::Acquire);
    let known: &'static KnownType =
        Box::leak(Box::new(KnownType { description, next: AtomicPtr::new(head) }));
    while let Err(newer) = KNOWN.compare_exchange(
        head,
        std::ptr::from_ref(known).cast_mut(),
        Ordering::AcqRel,
        Ordering::Acquire,
    ) {
        head = newer;
        known.next.store(head, Ordering::Relaxed);
    }
    PlainType(&known.description)
}

/// FNV-1a, folded.
fn fingerprint(name: &str, size: usize, align: usize) -> u32 {
    let sizes = [size as u64, align as u64].map(u64::to_le_bytes);
    let bytes = name.bytes().chain(sizes.into_iter().flatten());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    (hash ^ hash >> BITS ^ hash >> (2 * BITS)) as u32 & ((1 << BITS) - 1)
}

impl PartialEq for PlainType {
    #[inline]
    fn eq(&self, other: &PlainType) -> bool {
        (self.0.fingerprint, self.0.size) == (other.0.fingerprint, other.0.size)
    }
}

impl Eq for PlainType {}

impl Hash for PlainType {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.0.fingerprint, self.0.size).hash(state);
    }
}

impl PartialOrd for PlainType {
    fn partial_cmp(&self, other: &PlainType) -> Option<Order> {
        Some(self.cmp(other))
    }
}

impl Ord for PlainType {
    fn cmp(&self, other: &PlainType) -> Order {
        (self.0.fingerprint, self.0.size).cmp(&(other.0.fingerprint, other.0.size))
    }
}

impl fmt::Debug for PlainType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PlainType({}, {} bytes)", self.name(), self.size())
    }
}

#[cfg(test)]
mod tests {
    use crate::types::dtype::{DType, Plain};

    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    #[repr(C)]
    struct One([u32; 3]);

    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    #[repr(C)]
    struct Other([u32; 3]);

    #[test]
    fn a_type_is_known_by_its_name_and_size() {
        let [one, other, same] = [One::dtype(), Other::dtype(), One::dtype()];
        assert!(one == same && one != other, "{one:?} {other:?}");
        assert!(one.name().ends_with("::One") && one.size() == 12 && !one.is_number());
        assert_eq!(u128::dtype().size(), 16);
        assert_eq!(<[f32; 5]>::dtype().name(), "[f32; 5]");
        assert_eq!(f32::dtype(), DType::F32);
    }

    #[test]
    fn a_type_comes_back_from_its_fingerprint() {
        let one = One::dtype();
        let (dtype, length) = DType::decode(one.code(), one.mark(5)).unwrap();
        assert_eq!((dtype.name(), length), (one.name(), 5));
        let (unknown, _) = DType::decode(one.code(), 0x00_12_34 << 40).unwrap();
        assert_eq!((unknown.name(), unknown.size()), ("plain data #001234, unknown to this rank", 1));
        let longest = u64::MAX;
        let numbers = || DType::ALL.iter().map(|dtype| (*dtype, dtype.code()));
        assert!(
            numbers().all(|(dtype, code)| DType::decode(code, dtype.mark(longest)) == Some((dtype, longest)))
        );
        assert!(DType::decode(15, 0).is_none());
    }

    #[test]
    fn threads_that_use_a_type_for_the_first_time_agree() {
        #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
        #[repr(C)]
        struct Fresh(u64, u64);
        let values: Vec<DType> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(Fresh::dtype)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(values.iter().all(|dtype| *dtype == values[0] && dtype.size() == 16));
    }
}
