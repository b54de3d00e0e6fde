//! User objects: what graphs keep alive.

use super::error::INVALID_VALUE;
use crate::call::{Answer, Code, in_host_function};
use crate::handles::{self, Handle, Handles};
use crate::lock;
use crate::pointers::Out;
use crate::random;
use std::ffi::{c_uint, c_void};
use std::sync::{Arc, Mutex};

/// An object of a caller, with the function that ends it.
pub struct UserObject {
    handle: Handle,
    data: *mut c_void,
    destroy: unsafe extern "C" fn(*mut c_void),
}

// SAFETY: the caller gives the object to be ended by any thread.
unsafe impl Send for UserObject {}
// SAFETY: nobody but the destructor touches it.
unsafe impl Sync for UserObject {}

/// A reference to a user object.
#[derive(Clone)]
pub struct Reference(Arc<UserObject>);

/// What a graph keeps.
pub type Kept = Vec<Reference>;

/// The references that callers own.
static OWNED: Handles<Mutex<Kept>> = Handles::new("user object");

impl Drop for UserObject {
    fn drop(&mut self) {
        let (data, destroy) = (self.data as usize, self.destroy);
        // CUDA promises neither a thread nor a time.
        std::thread::spawn(move || {
            random::shared().dawdle();
            // SAFETY: the caller gave the function to be called once with this argument.
            in_host_function(|| unsafe { destroy(data as *mut c_void) });
        });
    }
}

impl Reference {
    pub fn handle(&self) -> Handle {
        self.0.handle
    }
}

/// References for a graph: new ones, or with `CU_GRAPH_USER_OBJECT_MOVE` the caller's.
pub fn for_graph(function: &str, object: Handle, count: c_uint, flags: c_uint) -> Result<Kept, Code> {
    let owned = OWNED.get(function, object);
    let mut owned = lock(&owned);
    let first = owned.first().cloned().ok_or(INVALID_VALUE)?;
    match flags {
        0 => Ok(vec![first; count as usize]),
        1 if owned.len() >= count as usize => Ok(owned.drain(..count as usize).collect()),
        _ => Err(INVALID_VALUE),
    }
}

fn release(function: &str, object: Handle, count: c_uint) -> Answer {
    let owned = OWNED.get(function, object);
    let mut owned = lock(&owned);
    if owned.len() < count as usize {
        return Err(INVALID_VALUE);
    }
    owned.drain(..count as usize);
    Ok(())
}

exported! {
    fn cuUserObjectCreate(
        object: Out<Handle>, data: *mut c_void, destroy: Option<unsafe extern "C" fn(*mut c_void)>, count: c_uint,
        flags: c_uint,
    ) {
        // The destructor is never synchronised with anything, and the caller must say that this is known.
        if flags != 1 || count == 0 {
            return Err(INVALID_VALUE);
        }
        let handle = handles::fresh();
        let reference = Reference(Arc::new(UserObject { handle, data, destroy: destroy.ok_or(INVALID_VALUE)? }));
        OWNED.insert(handle, Arc::new(Mutex::new(vec![reference; count as usize])));
        object.set(handle);
        Ok(())
    }

    fn cuUserObjectRetain(object: Handle, count: c_uint) {
        let owned = OWNED.get(FUNCTION, object);
        let mut owned = lock(&owned);
        let first = owned.first().cloned().ok_or(INVALID_VALUE)?;
        owned.extend(vec![first; count as usize]);
        Ok(())
    }

    fn cuUserObjectRelease(object: Handle, count: c_uint) {
        release(FUNCTION, object, count)
    }
}
