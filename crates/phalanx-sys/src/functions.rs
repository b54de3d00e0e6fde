//! Tables of the functions of a loaded library.
//!
//! A table is a struct with a field for each function, laid out as an array of addresses. It is loaded and listed as that
//! array, so a function costs an entry of data and no code.

use crate::library::{Address, Library};
use std::ffi::CStr;

/// The addresses of functions, in the order of their names.
pub(crate) fn addresses<const N: usize>(library: &Library, names: &[&CStr; N]) -> [Address; N] {
    names.map(|name| library.address(name))
}

/// A function's name as a C string, from a literal that ends in NUL.
pub(crate) const fn c_name(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("the macro adds one NUL"),
    }
}

/// Defines a table. Each field is a function pointer, or an `Option` of one.
macro_rules! table {
    ($(#[$meta:meta])* pub struct $table:ident { $($(#[$field_meta:meta])* pub $name:ident: $ty:ty,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy)]
        #[repr(C)]
        pub struct $table { $($(#[$field_meta])* pub $name: $ty,)* }

        impl $table {
            /// The names of the fields.
            const FIELDS: &'static [&'static str] = &[$(stringify!($name)),*];

            /// The table of these addresses.
            ///
            /// # Safety
            /// Each address is that of a function of its field's type, and is `None` only if the field is an `Option`.
            unsafe fn from_addresses(addresses: [$crate::library::Address; $table::FIELDS.len()]) -> $table {
                // SAFETY: the fields are as many as the addresses, each of the size of a pointer and with the same
                // representation of `None`; their values fit by the caller's contract.
                unsafe { std::mem::transmute(addresses) }
            }

            fn addresses(&self) -> [$crate::library::Address; $table::FIELDS.len()] {
                // SAFETY: as in `from_addresses`; any pointer is a valid address.
                unsafe { std::mem::transmute(*self) }
            }
        }

        impl std::fmt::Debug for $table {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let fields = $table::FIELDS.iter().zip(self.addresses());
                fields.fold(&mut f.debug_struct(stringify!($table)), |all, (name, address)| all.field(name, &address)).finish()
            }
        }
    };
}

/// Defines `struct Functions`, whose fields are `None` where the library lacks a function.
macro_rules! functions {
    ($( $name:ident($($argument:ident: $ty:ty),*) -> $answer:ty; )*) => {
        $crate::functions::table! {
            /// The functions of the loaded library; `None` where it lacks one.
            #[allow(missing_docs, non_snake_case)]
            pub struct Functions {
                $(pub $name: Option<unsafe extern "C" fn($($argument: $ty),*) -> $answer>,)*
            }
        }

        impl Functions {
            fn load(library: &$crate::Library) -> Functions {
                let names = [$($crate::functions::c_name(concat!(stringify!($name), "\0"))),*];
                // SAFETY: the fields' types are those of the C header.
                unsafe { Functions::from_addresses($crate::functions::addresses(library, &names)) }
            }

            /// The names of the functions that the library lacks.
            pub fn missing(&self) -> Vec<&'static str> {
                let functions = Functions::FIELDS.iter().zip(self.addresses());
                functions.filter(|(_, address)| address.is_none()).map(|(name, _)| *name).collect()
            }
        }
    };
}

pub(crate) use {functions, table};
