"""Files of ``torch.save``: an uncompressed zip with a pickle in it, read without running any code.

``stored_zip`` is the archive, ``inert_pickle`` the pickle, ``tensor_item`` and ``plain_item`` the two kinds of items in
a DCP checkpoint, ``torch_file`` a file with tensors anywhere in nested data.  Open ``tensor_item`` first.
"""
