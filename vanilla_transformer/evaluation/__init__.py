"""Loss and translations of a split (`splits`), scored with sacreBLEU (`scores`); systems side by side (`systems`)."""
